import re

import pytest
import speculative_decoding


@pytest.mark.slow
def test_shipped_weights_decode_the_same_tokens_in_fewer_passes(capsys, monkeypatch):
    """By heads; n-grams draft in docs/speculative.md and in tests/models/test_speculative.py."""
    monkeypatch.setenv("COLUMNS", "100")
    arguments = ["--family", "gated_delta_net", "--drafter", "heads", "--tokens", "48"]
    arguments += ["--batch", "2", "--prompt-bytes", "200", "--show", "12", "--repeats", "1"]
    assert speculative_decoding.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "identical 96/96" in printed
    assert "\u0332" in printed and "\u0336" in printed  # accepted and refused, without colours
    assert "Gated DeltaNet, drafts by heads: 12 passes of row 0" in printed
    assert re.search(r"tokens per second: plain [\d,]+, speculative [\d,]+, [\d.]+x", printed)
    rows = re.findall(r"│ +\d+ │ +48 │ +(\d+) │ +([\d.]+) │ +(\d+) │ +(\d+) \((\d+)%\)", printed)
    assert len(rows) == 2
    for passes, rate, proposed, accepted, share in rows:
        assert int(passes) + int(accepted) == 48
        assert float(rate) == round(48 / int(passes), 2)
        assert 0 < int(accepted) <= int(proposed)
        assert int(share) == round(100 * int(accepted) / int(proposed))


def test_options_that_cannot_work_are_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(speculative_decoding, "heads_path", lambda family: tmp_path / family)
    for options, message in [
        (["--drafts", "16"], "at most 15"),
        (["--show", "0"], "--show must be at least 1"),
        (["--family", "kda", "--drafter", "heads"], "no heads for kda"),
        (["--prompt-bytes", "100000000"], "no held-out file is longer than twice the prompt"),
    ]:
        with pytest.raises(SystemExit):
            speculative_decoding.parse(options)
        assert message in capsys.readouterr().err
