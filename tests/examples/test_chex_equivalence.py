import chex_equivalence
import pytest


@pytest.mark.parametrize("pattern", ["steps", "prefill", "draft", "traces", "vmap"])
def test_runs_as_a_script(pattern, capsys):
    assert chex_equivalence.main(["-k", f"*_{pattern}_*mamba2*"]) == 0
    printed = "".join(capsys.readouterr())
    assert f"Ran {1 if pattern in ('traces', 'vmap') else 2} test" in printed
    assert "OK" in printed


def test_fails_where_replay_differs(monkeypatch, capsys):
    spec, inputs, outputs, recurrent = chex_equivalence.make_case("mamba2")
    wrong = chex_equivalence.Case(spec, inputs, outputs + 1e-3, recurrent)
    monkeypatch.setattr(chex_equivalence, "make_case", lambda family: wrong)
    assert chex_equivalence.main(["-k", "*prefill*mamba2*"]) == 1
    assert "failures=2" in "".join(capsys.readouterr())
