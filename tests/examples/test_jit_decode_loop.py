import jit_decode_loop
import pytest


# Both rules, both kinds of decay.
@pytest.mark.parametrize("mixer", ["mamba2", "kda"])
def test_both_loops_give_the_same_tokens(mixer, capsys):
    arguments = ["--pattern", "MA", "--d-model", "32", "--batch", "2", "--repeats", "1"]
    assert jit_decode_loop.main(["--mixer", mixer, "--tokens", "20", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "tokens identical: 40 of 40" in printed
    assert "conventional: cache of" in printed and "100% of it donated" in printed
    assert printed.count("us per step of 2 tokens") == 2


def test_bad_arguments_are_errors(capsys):
    with pytest.raises(SystemExit):
        jit_decode_loop.main(["--tokens", "0"])
    assert "must be at least 1" in capsys.readouterr().err
