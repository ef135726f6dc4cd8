import chex_equivalence


def test_runs_as_a_script(capsys):
    assert chex_equivalence.main(["-k", "mamba2"]) == 0
    printed = "".join(capsys.readouterr())
    assert "Ran 8 tests" in printed and "OK" in printed


def test_fails_where_replay_differs(monkeypatch, capsys):
    spec, inputs, outputs, recurrent = chex_equivalence.make_case("mamba2")
    wrong = chex_equivalence.Case(spec, inputs, outputs + 1e-3, recurrent)
    monkeypatch.setattr(chex_equivalence, "make_case", lambda family: wrong)
    assert chex_equivalence.main(["-k", "*prefill*mamba2*"]) == 1
    assert "failures=2" in "".join(capsys.readouterr())
