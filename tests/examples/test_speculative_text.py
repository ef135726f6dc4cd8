import re

import pytest
import speculative_text


@pytest.mark.slow
def test_shipped_weights_decode_the_same_tokens_in_fewer_passes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    arguments = ["--family", "gated_delta_net", "--tokens", "48", "--batch", "2"]
    assert speculative_text.main([*arguments, "--prompt-bytes", "200"]) == 0
    printed = capsys.readouterr().out
    assert "identical 96/96" in printed
    rows = re.findall(r"│ +\d+ │ +48 │ +(\d+) │ +([\d.]+) │ +(\d+) │ +(\d+) \((\d+)%\)", printed)
    assert len(rows) == 2
    for passes, rate, proposed, accepted, share in rows:
        assert int(passes) + int(accepted) == 48
        assert float(rate) == round(48 / int(passes), 2)
        assert 0 < int(accepted) <= int(proposed)
        assert int(share) == round(100 * int(accepted) / int(proposed))
