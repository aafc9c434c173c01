"""Sentences about what an arm gains over plain softmax, and how sure that is."""

from __future__ import annotations

from sharpmax.report.reproduce.facts import LEVEL, Verdict, verdict
from sharpmax.report.reproduce.looks import in_order, look
from sharpmax.report.reproduce.tables import crossing, part, row
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.words import capital, count, joined, nats, percent, points, probability

__all__ = ["end_sentence", "gain_sentences", "hard_sentence", "others_sentence"]


def gain_sentences(tables: Tables, recipe: str, found: Verdict, under: str = "", *, brief: bool = False) -> list[str]:
    """What an arm gains or loses; `under` is put in front of the first sentence, `brief` leaves the test out."""
    subject, total = look(found.arm).subject, len(found.gains)
    if not any(found.gains.values()):
        return [capital(f"{under}{subject} is right exactly as often as plain softmax, at every size.")]
    if not found.tested:
        if found.gains[found.best] <= 0:
            return [capital(f"{under}{subject} is nowhere right more often than plain softmax, for this one seed.")]
        return [
            capital(f"{under}{subject} raises accuracy {_at(tables, recipe, found, found.best)}, its largest gain."),
            "One seed cannot tell such a gain from chance.",
        ]
    if not found.better and not found.worse:
        return [
            capital(
                f"{under}{subject} makes no difference that this run can show: p is below {LEVEL} at none of {total} "
                f"sizes (largest gain {points(found.gains[found.best])} points, at {count(found.best)} items)."
            )
        ]
    test = f"(p < {LEVEL}, paired t-test across seeds)"
    most = f"most at {count(found.worst)} items ({points(found.gains[found.worst])} points)"
    if not found.better:
        return [
            capital(
                f"{under}{subject} costs accuracy: it is better than plain softmax at none of {total} sizes and worse "
                f"at {len(found.worse)} {test}, {most}."
            )
        ]
    worse = f"worse at {len(found.worse)}, {most}" if found.worse else "worse at none"
    counted = f"better than plain softmax at {len(found.better)} of {total} sizes and {worse}"
    gain = f"{under}{subject} raises accuracy {_at(tables, recipe, found, found.best)}, its largest gain"
    if brief:
        return [capital(f"{gain}; it is {counted}.")]
    return [capital(f"{gain}."), f"It is {counted} {test}. No weight of the model is changed for that."]


def hard_sentence(found: Verdict) -> str:
    """How much an arm reaches of what hard argmax reaches with the same weights."""
    if found.arm == "hard" or not found.of_ceiling:
        return ""
    least = min(found.of_ceiling.values())
    much = "as much as" if least >= 99.9 else f"at least {percent(least)} of what"
    return (
        f"At every size it reaches {much} the same model reaches when the item with the largest logit takes the whole "
        "weight (hard argmax)."
    )


def others_sentence(tables: Tables, recipe: str, shown: str) -> str:
    """The largest gains of all other arms, in one sentence."""
    arms = [arm for arm in in_order(part(tables, "comparison", recipe) or {}) if arm not in (shown, "hard")]
    said = []
    for arm in arms:
        found = verdict(tables, recipe, arm)
        if found is None:
            continue
        gain = f"{points(found.gains[found.best])} points at {count(found.best)} items"
        if found.better or (not found.tested and found.gains[found.best] > 0):
            loss = f" (but worse at {len(found.worse)} sizes)" if found.worse else ""
            said.append(f"{gain} with {look(arm).subject}{loss}")
        else:
            said.append(f"none shown with {look(arm).subject}")
    return f"The largest gains of the others: {joined(said)}." if said else ""


def end_sentence(tables: Tables, recipe: str, under: str = "") -> str:
    """Where the paper's polynomial stops acting on these models; nothing if the run does not say."""
    fit, entropy = part(tables, "fit", recipe), row(tables, "entropy", recipe, "softmax")
    if not fit or not entropy or fit["paper_acts_on"][1] is None:
        return ""
    end = fit["paper_acts_on"][1]
    beyond = [n for n in sizes(entropy) if entropy[n]["mean"] > end]
    if not beyond:
        return capital(
            f"{under}the paper's polynomial acts up to an entropy of {nats(end)} nats, which plain softmax does not "
            "exceed on average at any size of this run."
        )
    where = crossing(entropy, end)
    start = f"at about {count(where)} items" if where else f"from {count(beyond[0])} items on"
    return capital(
        f"{under}the paper's polynomial does nothing to rows above {nats(end)} nats of entropy, which plain softmax "
        f"exceeds on average {start}."
    )


def _at(tables: Tables, recipe: str, found: Verdict, n: str) -> str:
    """From where to where at a size, as the end of "raises accuracy …"."""
    p = found.p[n]
    gain = f"{points(found.gains[n])} points" + (f", {probability(p)}" if p is not None else "")
    before, after = row(tables, "accuracy", recipe, "softmax"), row(tables, "accuracy", recipe, found.arm)
    if not before or not after or n not in before or n not in after:
        return f"at {count(n)} items ({gain})"
    return f"at {count(n)} items from {percent(before[n]['mean'])} to {percent(after[n]['mean'])} ({gain})"
