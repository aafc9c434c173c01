"""Problems with known answers and a size that can grow: seeded, versioned, the same on every device."""

from typing import TYPE_CHECKING

from sharpmax.lazy import lazy_exports

if TYPE_CHECKING:
    from sharpmax.tasks.prompt import Prompt as Prompt
    from sharpmax.tasks.prompt import Task as Task
    from sharpmax.tasks.registry import TASKS as TASKS
    from sharpmax.tasks.registry import get_task as get_task
    from sharpmax.tasks.text import chat_questions as chat_questions
    from sharpmax.tasks.text import plain_text as plain_text

_homes = {
    "TASKS": "sharpmax.tasks.registry",
    "Prompt": "sharpmax.tasks.prompt",
    "Task": "sharpmax.tasks.prompt",
    "chat_questions": "sharpmax.tasks.text",
    "get_task": "sharpmax.tasks.registry",
    "plain_text": "sharpmax.tasks.text",
}

__all__ = ["TASKS", "Prompt", "Task", "chat_questions", "get_task", "plain_text"]

__getattr__, __dir__ = lazy_exports(__name__, _homes)
