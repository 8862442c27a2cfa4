from benchmarks.peers.attempts import FOLDER, AttemptLog, AttemptReader


def test_what_is_written_is_read_in_the_order_of_time(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    first, second, reader = AttemptLog("rank0"), AttemptLog("rank1"), AttemptReader(tmp_path)
    first.add(1, 10.0, 4)
    second.add(1, 10.5, 4, committed=False)
    assert [(a.who, a.step, a.committed) for a in reader.attempts()] == [
        ("rank0", 1, True), ("rank1", 1, False),
    ]  # fmt: skip
    first.add(2, 11.0, 3)
    assert [a.groups for a in reader.attempts()] == [4, 4, 3]
    first._file.close()
    second._file.close()


def test_a_line_that_is_not_finished_waits_for_its_end(tmp_path):
    line = '{"who":"r","pid":1,"step":1,"began_at":0,"ended_at":1,"committed":true,"groups":4}\n'
    file, reader = tmp_path / "r.1.jsonl", AttemptReader(tmp_path)
    file.write_text(line + line[:20])
    assert len(reader.attempts()) == 1
    file.write_text(line + line)
    assert len(reader.attempts()) == 2
