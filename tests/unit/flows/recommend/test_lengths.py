import json

import pytest

from memprof.errors import UsageError
from memprof.flows.recommend.lengths import NUM_SAMPLES, compute_quantile, read_lengths
from memprof.flows.recommend.oom_probability import cut_lengths


def test_one_a_line_with_what_is_none(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_bytes(b"\xef\xbb\xbf512\r\n\n 1,024 \nabc\n-3\n0\n2.5\n\xff\xfe\n7\n")
    lengths, read = read_lengths(file)
    assert lengths == [7, 512, 1024]
    assert (read.count, read.empty, read.bad) == (3, 1, 5)
    assert read.bad_examples == ("line 4: 'abc'", "line 5: '-3'", "line 6: '0'")
    assert (read.shortest, read.median, read.longest) == (7, 512, 1024)


def test_json_lines(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"id": 1, "input_ids": [1, 2, 3]}, {"id": 2, "input_ids": []}, {"id": 3}, {"id": 4, "input_ids": [1] * 9}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\nnot json\n\n")
    lengths, read = read_lengths(file)
    assert lengths == [3, 9]
    assert (read.empty, read.bad) == (2, 2)  # row 3 and the last line; no tokens, and no JSON
    assert read.file.endswith("column input_ids")
    assert read_lengths(file, "id")[0] == [1, 2, 3, 4]
    with pytest.raises(UsageError, match="no row has this column"):
        read_lengths(file, "size")


def test_which_column(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1, "b": 2}\n')
    with pytest.raises(UsageError, match="which column"):
        read_lengths(file)
    file.write_text('{"a": 5}\n')
    assert read_lengths(file)[0] == [5]


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "length": [5, None, 12]}), file)
    lengths, read = read_lengths(file)
    assert lengths == [5, 12] and read.empty == 1
    with pytest.raises(UsageError, match="no such column"):
        read_lengths(file, "size")


@pytest.mark.parametrize("text", ["", "\n\n", "a\nb\n"])
def test_no_length(tmp_path, text):
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match="no length in the file"):
        read_lengths(file)


def test_no_file(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        read_lengths(tmp_path / "none.txt")


def test_cut(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, [10, 20, 30, 40])))
    lengths, read = cut_lengths(*read_lengths(file), 25)
    assert lengths == [10, 20, 25, 25]
    assert (read.truncated, read.longest, read.p99, read.packed_rows) == (2, 25, 25, 4)


def test_quantile():
    assert [compute_quantile([1, 2, 3, 4], share) for share in (0.0, 0.25, 0.5, 0.51, 1.0)] == [1, 1, 2, 3, 4]


def test_a_distribution_is_drawn():
    lengths, read = read_lengths("lognormal:200,0.5")
    assert (read.file, read.count, len(lengths)) == ("lognormal:200,0.5, 20,000 drawn", NUM_SAMPLES, NUM_SAMPLES)
    assert lengths == sorted(lengths) and sum(lengths) / NUM_SAMPLES == pytest.approx(200, rel=0.02)
