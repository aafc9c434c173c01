// On a phone, a table of four columns or more becomes a list of its rows, each cell under its column's name.
// Tables in closed sections are not rendered and have no innerText.
const words = (cell) => {
  const copy = cell.cloneNode(true)
  copy.querySelectorAll("br").forEach((one) => one.replaceWith(" "))
  return copy.textContent.replace(/\s+/g, " ").trim()
}
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const names = [...table.querySelectorAll("thead th")].map(words)
  if (names.length < 4) continue
  table.dataset.stacks = ""
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, at) => { cell.dataset.name = names[at] ?? "" })
  }
}

// A figure opens on its own, as large as the screen.
for (const image of document.querySelectorAll(".md-typeset p img")) {
  const shown = image.closest("picture") ?? image
  if (shown.parentElement.tagName !== "P") continue
  const link = document.createElement("a")
  link.href = image.src
  shown.replaceWith(link)
  link.append(shown)
}
