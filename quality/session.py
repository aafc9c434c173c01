"""pytest for hunts: its options, and tests run one by one."""

from __future__ import annotations

import pytest

__all__ = ["OPTIONS", "Failures", "Quick", "failure"]

OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "not gpu", "--capture=no"]
# Compilers and the interpreter of kernels take minutes under a tracer.
OPTIONS += ["-k", "not compile and not triton"]
# They are loaded before pytest could rewrite their assertions, and have none that matter here.
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--assert=plain"]


class Quick:
    """A plugin: a property that fails has done its part, and no smaller example is looked for."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Change the profile after conftest.py has set its own, and before tests are imported that copy it."""
        from hypothesis import Phase, settings

        settings.register_profile("quality", settings(), phases=[Phase.explicit, Phase.generate])
        settings.load_profile("quality")


class Failures:
    """A plugin that keeps the first failure of the tests that have run."""

    first: tuple[str, str] | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the name of the test and why it failed."""
        if report.failed and self.first is None:
            self.first = (report.nodeid, report.longreprtext)


def failure(item: pytest.Item, following: pytest.Item | None) -> str | None:
    """Why a test fails, or None. Run by the hook itself, which other plugins wrap."""
    failures = Failures()
    item.config.pluginmanager.register(failures)
    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
    item.config.pluginmanager.unregister(failures)
    return failures.first and failures.first[1]
