"""Policies by name and from files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import sharpmax as sm
from sharpmax.errors import ArgumentError, ArgumentTypeError, FileFormatError
from sharpmax.policies import PAPER, Constant, LogLength, PerHead, resolve_policy


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


def test_public_functions_take_paths(tmp_path):
    path = Constant(2.0).save(tmp_path / "two.json")
    row = torch.randn(4, 9)
    assert torch.equal(sm.softmax(row, policy=str(path)), sm.softmax(row, policy=Constant(2.0)))


@pytest.mark.parametrize("name", ["papr", "Paper", "", "no/such/file.json", "."])
def test_an_unknown_name_lists_the_choices(name):
    with pytest.raises(ArgumentError) as caught:
        sm.load_policy(name)
    allowed = "one of ['none', 'paper', 'smollm2', 'smollm2-constant'] or the path of a policy file"
    assert str(caught.value) == f"policy: got {name!r}; allowed: {allowed}"


@pytest.mark.parametrize("wrong", [3, 1.5, ["paper"], torch.zeros(1)])
def test_other_types_list_the_choices(wrong):
    for read in (sm.load_policy, resolve_policy):
        with pytest.raises(
            ArgumentTypeError, match=r"got \w+; allowed: .*one of \['none', 'paper', 'smollm2', 'smollm2-constant'\]"
        ):
            read(wrong)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"beta = 2", "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"3", "not a sharpmax policy"),
        (b'{"schema": 1, "kind": "constant", "value": NaN}', "got nan; allowed: a finite number"),
        (b'{"schema": 1, "kind": "constant", "value": Infinity}', "got inf; allowed: a finite number"),
        (b'{"schema": 2, "kind": "constant"}', "got schema 2; allowed: 1"),
    ],
    ids=lambda x: repr(x[:40]),
)
def test_a_file_that_is_no_policy_is_named(tmp_path, content, says):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        sm.load_policy(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert str(caught.value).startswith("policy: ")


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


def test_the_policy_for_smollm2_comes_with_the_package():
    policy = sm.load_policy("smollm2")
    assert isinstance(policy, PerHead)
    assert (policy.layers, policy.heads) == (30, 9)
    assert not policy.is_identity
