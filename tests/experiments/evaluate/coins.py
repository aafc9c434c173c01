"""A task for EleutherAI's harness, in two small files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def questions() -> list[dict[str, Any]]:
    rng = random.Random(6)
    return [{"question": "".join(rng.choices("ab ?", k=20)) + "So:", "label": rng.randrange(2)} for _ in range(40)]


def write(folder: Path) -> Path:
    """Write the data, and the task file that reads them; return the folder of the task file."""
    data = folder / "coins.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in questions()))
    (folder / "tasks").mkdir()
    task = Path(__file__).with_name("coins.yaml").read_text().replace("DATA", str(data))
    (folder / "tasks" / "coins.yaml").write_text(task)
    return folder / "tasks"
