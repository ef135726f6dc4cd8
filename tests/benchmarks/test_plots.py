"""Tables and pictures of results, and the documents' sections that show them."""

import dataclasses

import harness
import pytest
import tables
from documents import ROOT
from harness import Timing

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = {
    "README.md": "",
    "docs/kernels.md": "../",
    "docs/precision.md": "../",
    "docs/serving.md": "../",
    "docs/speculative.md": "../",
}

GDN = dict(case="gated_delta_net, 32 heads", family="gated_delta_net")
MAMBA = dict(case="mamba2-80, 96 heads x 80", family="mamba2")


def row(us, baseline, batch=1, tokens=1, share=0.5, implementation="mosaic_gpu", **facts):
    facts = {"extra": {"window": 2, "conventional_us": {"xla": baseline}}} | facts
    one = harness.row(
        Timing(us, us, us),
        Timing(baseline, baseline, baseline),
        batch=batch,
        tokens=tokens,
        read_dtype=None,
        implementation=implementation,
        fraction_of_read_bandwidth=share,
        rel_err=1e-7,
        **facts,
    )
    return dataclasses.asdict(one)


def record(*rows):
    return {"benchmark": "kernels", "device": "a card", "jax": "0.11.2", "rows": list(rows)}


KERNELS = record(
    row(4.0, 3.0, **MAMBA),
    row(100.0, 190.0, batch=256, share=0.912, **MAMBA),
    row(99.0, 190.0, batch=256, **MAMBA | {"case": "mamba2-80, 96 heads x 80, staggered"}),
    row(500.0, 190.0, batch=256, implementation="xla", **MAMBA),
    row(50.04, 75.0, batch=256, share=None, **GDN),
    row(80.0, 200.0, batch=256, tokens=4, **GDN),
)


def fill_row(name, us):
    case = f"{GDN['case']}, {name}"
    extra = {"window": 2, "fill": name}
    return row(us, 30.0, batch=8, share=None, case=case, family="gated_delta_net", extra=extra)


FILLS = record(*map(fill_row, ["fill 0", "fill 1", "fill 2", "staggered"], [9, 10, 40, 24.96]))


def test_kernel_table():
    assert tables.kernel_table(KERNELS).splitlines() == [
        "| conventional → replay, us | batch 1 | batch 256 | of read bandwidth |",
        "| --- | ---: | ---: | ---: |",
        "| Mamba-2, 96 heads x 80 | 3.0 → 4.0 (0.75x) | 190.0 → 100.0 (1.90x) | 91% |",
        "| GDN, 32 heads |  | 75.0 → 50.0 (1.50x) |  |",
        "| GDN, verify of 4 tokens, 32 heads |  | 200.0 → 80.0 (2.50x) | 50% |",
    ]


def test_implementations_table():
    rows = [
        row(us, 75.0, batch=256, implementation=name, **GDN)
        for us, name in ((50.0, "triton"), (45.0, "mosaic_gpu"))
    ]
    assert tables.implementations_table(record(*rows)).splitlines() == [
        "| us of a step | batch | conventional | triton | mosaic_gpu |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| GDN, 32 heads | 256 | 75.0 | 50.0 | 45.0 |",
    ]


def test_kernel_table_of_a_device_without_mosaic():
    """It shows what runs there by default, Triton before XLA."""
    facts = dict(case=GDN["case"], family=GDN["family"])
    rows = [
        row(us, 75.0, implementation=name, **facts) for name, us in (("xla", 90), ("triton", 50))
    ]
    assert tables.kernel_table(record(*rows)).splitlines()[2] == (
        "| GDN, 32 heads | 75.0 → 50.0 (1.50x) | 50% |"
    )


def test_window_table():
    """An empty window is no step of a running loop: after a flush the new record is there."""
    assert tables.window_table(FILLS).splitlines()[2] == (
        "| GDN, 32 heads | 8 | 30.0 | 25.0 | 40.0 | 25.0 |"
    )


def test_windows_table():
    rows = [
        row(us, 75.0, batch=256, family="gated_delta_net", case=f"{GDN['case']}, window {words}")
        | {"read_dtype": "int8", "extra": {"window": int(words[:2])}}
        for us, words in ((30.0, "32"), (25.0, "16"), (20.0, "16, windowed"))
    ]
    assert tables.windows_table(record(*rows)).splitlines() == [
        "| conventional → replay, us | batch | window 16 | window 32 |",
        "| --- | ---: | ---: | ---: |",
        "| GDN, int8 read copy, 32 heads | 256 | 75.0 → 25.0 (3.00x) | 75.0 → 30.0 (2.50x) |",
        "| GDN, int8 read copy, 32 heads, windowed | 256 | 75.0 → 20.0 (3.75x) |  |",
    ]


def test_sharded_table():
    extra = {"collectives": {"all-reduce f32[8]": 3}, "collective_share": 0.125, "efficiency": 0.9}
    facts = {"case": "like a model, 8 blocks", "family": "mamba2", "batch": 512}
    rows = [
        row(4000.4, 4000.4, implementation="replay 1x1", **facts, extra={}),
        row(2000.0, 4000.4, implementation="replay 1x2", **facts, extra=extra),
        row(9000.0, 9000.0, implementation="conventional 1x1", **facts, extra={}),
    ]
    assert tables.sharded_table(record(*rows)).splitlines()[2:] == [
        "| like a model, 8 blocks | replay | 512 | 4,000 "
        "| 2,000 (efficiency 0.90, collectives 12%) |",
        "| like a model, 8 blocks | conventional | 512 | 9,000 |  |",
    ]


def test_peers_table():
    rows = [row(5.0, 4.0, batch=b, implementation="fla-core 0.6.0", **GDN) for b in (1, 16)]
    assert tables.peers_table(record(*rows)).splitlines()[2] == (
        "| GDN, 32 heads | fla-core 0.6.0 | 4.0, 5.0 | 4.0, 5.0 |"
    )


def speculative_rows(batch, *names, **extra):
    """Rows of one case, each scheme with half the time of the one before."""
    facts = {"rate": 0.7, "does_not_fit": [], "baseline_tokens_per_second": 1000.4} | extra
    speeds = {"tokens_per_pass": 2.345, "speedup_over_snapshots": 2.0}
    for i, name in enumerate(names, 1):
        found = {"tokens_per_second": 1000.4 * 2**i}
        if name.startswith("replay"):
            found |= speeds if "snapshot speculation" in names else {"tokens_per_pass": 2.345}
        case = dict(case="a model, T=4", family="kda", tokens=4, batch=batch)
        yield row(8.0 / 2**i, 8.0, implementation=name, extra=facts | found, **case)


SPECULATIVE = record(
    *speculative_rows(16, "plain replay", "snapshot speculation", "replay speculation"),
    *speculative_rows(
        64, "plain replay", "replay speculation", does_not_fit=["snapshot speculation"]
    ),
)


def test_speculative_table():
    assert tables.speculative_table(SPECULATIVE).splitlines()[2:] == [
        "| a model, T=4 | 16 | 1,000 | 2,001 | 4,002 | 8,003 | 2.35 | 8.00x | 2.00x |",
        "| a model, T=4 | 64 | 1,000 | 2,001 | does not fit | 4,002 | 2.35 | 4.00x |  |",
    ]


def test_memory_tables():
    def held(scheme, tokens, state, ring, batch):
        facts = {"model": "m", "family": "kda", "scheme": scheme, "tokens": tokens}
        return facts | {"held": {"state": state, "ring": ring}, "largest_batch": batch}

    rows = [
        held("conventional", 1, 2e6, 0, 900),
        held("replay", 1, 2e6, 1e6, 800),
        held("snapshots", 4, 1e7, 0, 300),
        held("replay", 4, 2e6, 1e6, 750),
    ]
    assert tables.memory_table({"rows": rows}).splitlines()[2:] == [
        "| m (KDA) | 4 | 2.0 | 10.0 | 3.0 | 50% | 300 | 750 | 2.50x |"
    ]
    facts = {"model": "m", "family": "kda", "tokens": 4, "program_bytes": 9.9e10, "us": 1234.5}
    ran = [
        facts | {"scheme": "snapshots", "counted": 1e7, "measured": 1.1e7, "batch": 300},
        facts | {"scheme": "replay", "counted": 3e6, "measured": None, "batch": 750},
        facts | {"scheme": "replay", "counted": 3e6, "measured": None, "batch": 999, "us": None},
    ]
    assert tables.largest_batch_table({"rows": ran}).splitlines()[2:] == [
        "| m (KDA) | 4 | snapshots | 10.0 | 11.0 | 300 |  | 99 | 1,234 |",
        "| m (KDA) | 4 | replay | 3.0 |  | 750 | 2.50x | 99 | 1,234 |",
    ]
    case = {"case": "kda, 2 heads", "family": "kda"}
    formats = [
        case | {"formats": "no copy", "held": 1.4688, "moved": 1.25},
        case | {"formats": "8-bit copy", "held": 1.8, "moved": 0.5},
    ]
    assert tables.formats_table({"formats": formats}).splitlines() == [
        "| layer: held, moved | no copy | 8-bit copy |",
        "| --- | ---: | ---: |",
        "| KDA, 2 heads | 1.47, 1.25 | 1.80, 0.50 |",
    ]


DOCUMENT = """before
<!-- benchmarks: {} results.json -->
old
<!-- end of benchmarks -->
after
"""


def test_sections_are_written_where_there_are_results(tmp_path):
    text = DOCUMENT.format("kernels")
    assert tables.fill_sections(text, tmp_path) == text
    (tmp_path / "results.json").write_text(harness.json.dumps(KERNELS))
    written = tables.fill_sections(text, tmp_path)
    assert "old" not in written and tables.kernel_table(KERNELS) in written
    assert written.startswith("before\n<!--") and written.endswith("-->\nafter\n")
    assert tables.fill_sections(written, tmp_path) == written
    picture = tables.fill_sections(DOCUMENT.format("kernels-picture"), tmp_path, "../")
    assert "](images/results.svg)" in picture
    picture = tables.fill_sections(DOCUMENT.format("kernels-picture"), tmp_path)
    assert "](docs/images/results.svg)" in picture
    with pytest.raises(ValueError, match="found 'kernel'"):
        tables.fill_sections(DOCUMENT.format("kernel"), tmp_path)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_show_the_results(name):
    """`python benchmarks/plots.py` writes what this expects."""
    text = (ROOT / name).read_text()
    assert tables.fill_sections(text, RESULTS, DOCUMENTS[name]) == text


def test_readme_has_sections():
    readme = (ROOT / "README.md").read_text()
    assert "<!-- benchmarks: kernels kernels-nvidia-h200.json -->" in readme
    assert readme.count("<!-- benchmarks: ") == readme.count("<!-- end of benchmarks -->")


def test_kinds_of_results():
    assert tables.is_kernels(KERNELS) and not tables.is_fills(KERNELS)
    assert tables.is_fills(FILLS) and not tables.is_kernels(FILLS)
    assert not tables.is_kernels(record(row(1.0, 2.0, **GDN, extra={})))
    assert tables.is_speculative(SPECULATIVE) and not tables.is_kernels(SPECULATIVE)
    for path in RESULTS.glob("*.json"):  # those without a picture must not be in the way
        found = tables.load(path)
        kinds = tables.is_kernels, tables.is_fills, tables.is_speculative
        assert sum(kind(found) for kind in kinds) <= 1


def test_pictures(tmp_path, capsys):
    plots = pytest.importorskip("plots", reason="needs matplotlib", exc_type=ImportError)
    assert plots.DOCUMENTS == DOCUMENTS
    staggered = record(row(9.0, 9.0, **GDN | {"case": f"{GDN['case']}, staggered"}))
    records = {"kernels": KERNELS, "fills": FILLS, "other": record(), "staggered": staggered}
    for name, found in records.items():
        (tmp_path / f"{name}.json").write_text(harness.json.dumps(found))
    out = tmp_path / "images"
    first = plots.draw(tmp_path / "kernels.json", out).read_bytes()
    assert plots.draw(tmp_path / "kernels.json", out).read_bytes() == first
    assert len(first) < 100_000
    assert plots.draw(tmp_path / "other.json", out) is None
    assert plots.draw(tmp_path / "staggered.json", out) is None
    assert plots.main([str(tmp_path / "fills.json"), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"kernels.svg", "fills.svg"}
    assert plots.main([str(tmp_path / "other.json"), "--out", str(out)]) == 0
    assert "other.json: has no picture" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        plots.main([str(tmp_path / "none.json")])
    assert "no such file" in capsys.readouterr().err
    for text, words in (("{", "torn.json is not JSON"), ("[1]", "found list")):
        (tmp_path / "torn.json").write_text(text)
        with pytest.raises(SystemExit):
            plots.main([str(tmp_path / "torn.json"), "--out", str(out)])
        assert words in capsys.readouterr().err


def test_what_pictures_show():
    plots = pytest.importorskip("plots", reason="needs matplotlib", exc_type=ImportError)
    with plots.style():
        speed, reads = plots.draw_kernels(KERNELS).axes
        (window,) = plots.draw_window(FILLS).axes
    by_label = {line.get_label(): list(line.get_ydata()) for line in speed.get_lines()}
    assert by_label["Mamba-2, 96 heads x 80"] == [0.75, 1.9]
    # Without a measured bandwidth there is no fraction of it.
    assert [line.get_label() for line in reads.get_lines()] == [
        "Mamba-2, 96 heads x 80",
        "GDN, verify of 4 tokens, 32 heads",
    ]
    assert [bar.get_height() for bar in window.patches] == [9, 10, 40]
    assert [line.get_ydata()[0] for line in window.get_lines()] == [24.96, 30]
    with plots.style():
        plain, snapshots = plots.draw_speculative(SPECULATIVE).axes
    assert list(plain.get_lines()[0].get_ydata()) == [8.0, 4.0]
    assert list(snapshots.get_lines()[0].get_xdata()) == [16]
    plots.plt.close("all")
