"""Problems with known answers and a size that can grow: seeded, versioned, the same on every device."""

from sharpmax.tasks.prompt import Prompt, Task
from sharpmax.tasks.registry import TASKS, get_task
from sharpmax.tasks.text import chat_questions, plain_text

__all__ = ["TASKS", "Prompt", "Task", "chat_questions", "get_task", "plain_text"]
