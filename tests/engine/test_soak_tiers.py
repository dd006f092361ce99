"""The soak of the tiers at a small size; `make soak-tiers` runs it with 10,000 requests."""

from __future__ import annotations

from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_tiers_change_no_answer(monkeypatch, tmp_path):
    """Half of the phases are killed; those that are closed leave nothing behind."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from soak_tiers import Soak

    soak = Soak(3, 100, tmp_path)
    report = soak.run()
    assert not soak.left
    phases = ("phases killed", "phases closed", "bytes flipped")
    assert sum(count for what, count in report.outcomes.items() if what not in phases) == 100
    assert report.outcomes["as alone, full"] > 20
    assert report.outcomes["as alone, compressed"] > 5
    assert report.outcomes["as alone, compressed at a place"] > 5
    assert report.outcomes["phases closed"] > 0
    assert report.tiers["compressed prefixes written"] > 0


def test_another_answer_is_seen(monkeypatch):
    """And two tokens that are equally likely are not one."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from soak_tiers_cases import Oracle

    oracle = Oracle.__new__(Oracle)
    oracle._known = {0: ([5, 6, 7], [1.0, 1e-6, 1.0])}
    assert oracle.judge(0, [[5, 6, 7]]) is None
    assert oracle.judge(0, [[5, 6, 7], [5, 9, 9]]) == "tie"
    assert "token 0 is 9, alone 5" in oracle.judge(0, [[5, 6, 7], [9, 6, 7]])
    assert "token 2 is 9" in oracle.judge(0, [[5, 6, 9]])
    assert "2 tokens, alone 3" in oracle.judge(0, [[5, 6]])
