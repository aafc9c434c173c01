"""Policies by name and from files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import sharpmax as sm
from sharpmax.errors import ArgumentError
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.polynomial import PAPER
from sharpmax.policies.registry import resolve_policy


def test_names():
    assert sm.load_policy("paper") is PAPER
    assert sm.load_policy("none") == Constant(1.0)
    assert resolve_policy(None) == Constant(1.0)
    assert resolve_policy("paper") is PAPER
    assert resolve_policy(PAPER) is PAPER


def test_a_name_comes_before_a_file_and_a_path_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Constant(7.0).save("paper")
    assert sm.load_policy("paper") is PAPER
    assert sm.load_policy(Path("paper")) == Constant(7.0)
    assert sm.load_policy("./paper") == Constant(7.0)


@pytest.mark.parametrize("read", [sm.load_policy, resolve_policy])
class TestTheSameEverywhere:
    """The library, models and the command line read the same words in the same way."""

    def test_kinds_with_a_number(self, read):
        assert read("log-length:64") == LogLength(reference=64.0)
        assert read("log-length:1e3") == LogLength(reference=1000.0)
        assert read("constant:1.5") == Constant(1.5)

    @pytest.mark.parametrize("name", ["policy.json", "sharpmax_policy.json"])
    def test_folders(self, read, name, tmp_path):
        Constant(2.0).save(tmp_path / name)
        assert read(str(tmp_path)) == Constant(2.0)

    def test_a_file_comes_before_a_kind_with_a_number(self, read, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Constant(7.0).save("constant:2")
        assert read("constant:2") == Constant(7.0)


def test_saving_again_replaces_the_file_or_leaves_it(tmp_path, monkeypatch):
    path = Constant(2.0).save(tmp_path / "policy.json")
    LogLength(4).save(path)
    assert sm.load_policy(path) == LogLength(4)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArgumentError, match="No space left on device"):
        Constant(3.0).save(path)
    assert sm.load_policy(path) == LogLength(4)
    assert [p.name for p in tmp_path.iterdir()] == ["policy.json"]
