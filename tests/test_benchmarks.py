"""Every benchmark runs, at a size that measures nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crossbow.bench.link import linked_hosts, why_not

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def namespaces(pid: int) -> list[str]:
    """Of this machine, those that process `pid` made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"crossbow-{pid}-")]


needs_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_loop_overhead_measures_both_loops_in_every_round(tmp_path: Path) -> None:
    done = run("loop_overhead.py", "--rounds", "2", "--steps", "16", "--json", f"{tmp_path}/out")
    assert done.returncode in (0, 1), done.stderr
    result = json.loads((tmp_path / "out").read_text())
    assert [case["claimed"] for case in result["cases"]] == [0.97, 0.99]
    for case in result["cases"]:
        rounds = case["samples_per_second"]
        shares = [a / b for a, b in zip(rounds["trainer"], rounds["by hand"], strict=True)]
        assert case["ratio"] == pytest.approx(sum(shares) / 2)  # the median of two
        assert case["holds"] == (case["ratio"] >= case["claimed"])
        assert case["case"] in done.stdout
    assert {"cpu", "cores", "torch", "python", "commit", "dirty", "seeds"} <= result.keys()
    assert done.returncode == (0 if all(case["holds"] for case in result["cases"]) else 1)


@pytest.mark.parametrize(
    "args",
    [
        ("loop_overhead.py", "--rounds", "0"),
        ("loop_overhead.py", "--steps", "17"),
        ("loop_overhead.py", "--steps", "0"),
        ("jitter.py", "--rounds", "0"),
        ("links.py", "--steps", "0"),
        ("wires.py", "--samples", "0"),
        ("memory.py", "--models", "none"),
        ("allreduce.py", "--rounds", "0"),
        ("methods.py", "--json", "none", "--seeds", "0"),
        ("plan.py", "--cases", "none"),
        ("tuner.py", "--part-seconds", "0"),
    ],
)
def test_a_size_that_can_not_be_measured_is_refused(args: tuple[str, ...]) -> None:
    assert run(*args).returncode == 2


@pytest.mark.slow
def test_allreduce_is_compared_with_both_settings_of_ddp(tmp_path: Path) -> None:
    size = ("--models", "mlp", "--rounds", "1", "--seconds", "0.01")
    done = run("allreduce.py", *size, "--json", f"{tmp_path}/out")
    assert done.returncode in (0, 1), done.stderr
    (line,) = json.loads((tmp_path / "out").read_text())["rows"]
    ratios = line["ratio_to"]["allreduce"]
    assert line["holds"] == (min(ratios["ddp"], ratios["ddp tuned"]) >= 1.2)


@pytest.mark.slow
def test_methods_runs_what_is_missing_and_draws_it(tmp_path: Path) -> None:
    size = ("--tasks", "lenet", "--epochs", "0.005", "--seeds", "1", "--json", f"{tmp_path}/out")
    done = run("methods.py", *size, "--methods", "alone", "diloco")
    assert done.returncode == 0, done.stderr
    more = run("methods.py", *size, "--methods", "diloco", "asgd", "--plot", f"{tmp_path}/plot")
    assert more.stdout.count("\n") == 1, more.stderr
    runs = json.loads((tmp_path / "out").read_text())["runs"]
    assert [key.split()[1] for key in runs] == ["alone", "diloco", "asgd"]
    assert all(found["looks"] and not found["error"] for found in runs.values()), runs
    assert (tmp_path / "plot").read_text().count("<polyline") == 6


@pytest.mark.slow
def test_jitter_compares_what_was_added_with_what_the_delays_say(tmp_path: Path) -> None:
    size = ("--model", "lenet", "--batch-size", "4", "--rounds", "2", "--steps", "10")
    done = run("jitter.py", *size, "--json", f"{tmp_path}/out")
    assert done.returncode in (0, 1), done.stderr
    result = json.loads((tmp_path / "out").read_text())
    for line in result["rounds"]:
        for way in ("slack", "barrier"):
            expected = line[f"{way}, expected"]
            assert 0 < expected["mean"] < expected["slack"] < expected["maximum"]
            added = line[f"{way}, delayed"] - line[f"{way}, calm"]
            assert added == pytest.approx(
                expected["mean"] + line[f"{way}, pays"] * (expected["maximum"] - expected["mean"])
            )
    assert done.returncode == (0 if all(result["holds"].values()) else 1)


@pytest.mark.slow
def test_plan_compares_with_all_candidates_and_measures_no_case_twice(tmp_path: Path) -> None:
    size = ("--cases", "mlp-16", "--seconds", "1", "--json", f"{tmp_path}/out")
    done = run("plan.py", *size)
    assert done.returncode in (0, 1), done.stderr
    case = json.loads((tmp_path / "out").read_text())["cases"]["mlp-16"]
    assert case["chosen"] in case["goodput_of_finalists"]
    assert 0 < case["choice_to_best"] <= 1
    assert len(case["goodput_of_all"]) > 10
    written = (tmp_path / "out").read_bytes()
    assert "all cases measured" in run("plan.py", *size).stderr
    assert (tmp_path / "out").read_bytes() == written


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a load of higher priority needs root")
def test_tuner_trains_under_a_load_and_judges(tmp_path: Path) -> None:
    done = run("tuner.py", "--part-seconds", "12", "--json", f"{tmp_path}/out")
    assert done.returncode in (0, 1), done.stderr
    result = json.loads((tmp_path / "out").read_text())
    assert set(result["learners"]) == {"found", "loaded", "recovered"}
    assert result["start"] == 8 * len(os.sched_getaffinity(0))
    assert done.returncode == (0 if all(result["holds"].values()) else 1)


@pytest.mark.slow
def test_memory_maps_what_the_layout_asks_for(tmp_path: Path) -> None:
    size = ("--models", "lenet", "--most-learners", "2")
    done = run("memory.py", *size, "--json", f"{tmp_path}/out")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads((tmp_path / "out").read_text())["cases"]
    assert [(case["learners"], case["ranks"]) for case in cases] == [(2, 1), (2, 2)]
    assert all(case["mapped_bytes"] >= case["arena_bytes"] for case in cases)


@needs_hosts
@pytest.mark.slow
def test_links_measures_limited_and_unlimited_and_leaves_no_host(tmp_path: Path) -> None:
    size = ("--model", "lenet", "--batch-size", "4", "--rounds", "1", "--steps", "3")
    done = run("links.py", *size, "--json", f"{tmp_path}/out")
    assert done.returncode in (0, 1), done.stderr
    result = json.loads((tmp_path / "out").read_text())
    # a ring of two sends n floats: half of them to be summed, then half of the sums
    payload = result["allreduce_payload_bytes"]
    assert payload < result["allreduce_wire_bytes"] < 1.2 * payload
    for name, keeps in result["keeps"].items():
        (limited,), (unlimited,) = result["speeds"][f"{name}, limited"], result["speeds"][name]
        assert keeps == pytest.approx(limited / unlimited)
    assert done.returncode == (0 if all(result["holds"].values()) else 1)


@needs_hosts
@pytest.mark.slow
def test_wires_counts_what_is_sent_and_times_what_is_summed(tmp_path: Path) -> None:
    size = ("--samples", "320", "--sizes", "1000", "--mbits", "0", "--rounds", "1")
    done = run("wires.py", *size, "--json", f"{tmp_path}/out")
    assert done.returncode in (0, 1), done.stderr
    result = json.loads((tmp_path / "out").read_text())
    for found in result["contenders"].values():  # the interface sees headers, too
        assert found["sent_bytes_a_step"] < found["wire_bytes_a_step"]
        assert found["wire_bytes_a_step"] < 1.5 * found["sent_bytes_a_step"] + 20000
    (line,) = result["topologies"]
    assert all(seconds > 0 for seconds in line["seconds"].values())
    assert done.returncode == (0 if all(result["holds"].values()) else 1)


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_links_removes_its_hosts_when_it_is_stopped(number: signal.Signals) -> None:
    command = [sys.executable, str(BENCHMARKS / "links.py"), "--model", "lenet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while len(namespaces(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(namespaces(process.pid)) == 2
        time.sleep(1)  # while the ranks start
        os.killpg(process.pid, number)  # a terminal sends Ctrl-C to the ranks, too
        assert process.wait(60) == 128 + number
        assert process.stderr
        assert b"Traceback" not in process.stderr.read()
    assert not namespaces(process.pid)


@needs_hosts
def test_hosts_of_a_killed_benchmark_are_removed_by_the_next() -> None:
    body = """
import os
from crossbow.bench.link import linked_hosts
hosts = linked_hosts()
hosts.__enter__()
os._exit(9)
"""
    with subprocess.Popen([sys.executable, "-c", body]) as process:
        assert process.wait(60) == 9
    assert len(namespaces(process.pid)) == 2
    with linked_hosts():
        assert len(namespaces(os.getpid())) == 2
        assert not namespaces(process.pid)
    assert not namespaces(os.getpid())


@needs_hosts
def test_a_limited_link_carries_at_its_rate() -> None:
    megabytes, rate = 4, 10
    program = f"""
import socket, sys, time
from crossbow.bench.link import Link
host = int(sys.argv[1])
Link((sys.argv[2], sys.argv[3])).enter(host)
if host == 0:
    with socket.create_server(("10.77.0.1", 29500)) as server:
        print("ready", flush=True)
        peer = server.accept()[0]
        start, got = time.perf_counter(), 0
        while part := peer.recv(2**16):
            got += len(part)
        print(got / (time.perf_counter() - start))
else:
    socket.create_connection(("10.77.0.1", 29500)).sendall(bytes({megabytes} * 10**6))
"""
    with linked_hosts() as link:
        link.limit(rate * 1e6)
        start = [sys.executable, "-c", program]
        receiver = [*start, "0", *link.namespaces]
        with subprocess.Popen(receiver, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            process.stdout.readline()
            subprocess.run([*start, "1", *link.namespaces], check=True, timeout=60)
            speed = float(process.stdout.readline())
        assert 0.8 * rate < speed / 1e6 < 1.05 * rate
        assert link.sent()[1] > megabytes * 1e6
        assert link.dropped() == 0


def test_links_says_why_it_can_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = run("links.py")
    assert done.returncode == 2
    assert done.stderr.startswith("skipped: ")


@pytest.mark.slow
def test_unequal_compares_with_what_each_does_alone(tmp_path: Path) -> None:
    sizes = ["--models", "resnet8", "--shares", "0.5", "--rounds", "1", "--seconds", "0.1"]
    done = run("unequal.py", *sizes, "--json", f"{tmp_path}/out")
    if done.returncode == 2:
        pytest.skip(done.stderr)
    assert done.returncode in (0, 1), done.stderr
    (result,) = json.loads((tmp_path / "out").read_text())["results"]
    speeds = result["samples_per_second"]
    alone = speeds["fast alone"] + speeds["slow alone"]
    assert result["of_sum"]["ddp"] == pytest.approx(speeds["ddp"] / alone)
    assert speeds["slow alone"] < speeds["fast alone"]
    assert not list(Path("/sys/fs/cgroup").glob("*/crossbow-*"))


@pytest.mark.slow
def test_applications_compare_what_was_written_with_the_claim(tmp_path: Path) -> None:
    sizes = ["--tasks", "captioner-shapes", "--epochs", "0.05"]
    done = run("applications.py", *sizes, "--json", f"{tmp_path}/out")
    assert done.returncode == 1, done.stderr
    (result,) = json.loads((tmp_path / "out").read_text())["results"]
    assert result["final_metrics"]["exact_match"] < result["claimed"] == 0.95


def test_engines_compares_ways_of_one_model(tmp_path: Path) -> None:
    ways = ("--ways", "sequential", "stacked")
    size = ("--models", "mlp", "--rounds", "2", "--seconds", "0.01", "--learners", "2")
    done = run("engines.py", "stacked", *size, *ways, "--json", f"{tmp_path}/out")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "out").read_text())["rows"]
    assert set(row["ratio_to_sequential"]) == {"sequential", "stacked"}
    assert row["ratio_to_sequential"]["sequential"] == 1.0


def test_gpu_engines_writes_down_what_fails_and_goes_on(tmp_path: Path) -> None:
    size = ("--models", "mlp", "--learners", "0", "2", "--seconds", "0.01", "--device", "cpu")
    done = run("gpu_engines.py", *size, "--json", f"{tmp_path}/out")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out").read_text())
    assert result["checks"][0]["relative_distance"] < 1e-3
    assert ["error" in row for row in result["speeds"]] == [True, True, False, False]
    assert "Traceback" in result["speeds"][0]["traceback"]


def test_fuzz_meets_no_error_but_ours(tmp_path: Path) -> None:
    done = run("fuzz.py", "--cases", "400", "--seconds", "3", "--json", f"{tmp_path}/out")
    assert done.returncode == 0, done.stderr
    readers = json.loads((tmp_path / "out").read_text())["readers"]
    assert len(readers) == 7
    assert all(reader["refused"] > 0 for reader in readers.values())


def test_checkpoint_overhead_compares_runs_with_and_without(tmp_path: Path) -> None:
    args = ("--rounds", "1", "--seconds", "2.5", "--tasks", "mlp-digits")
    done = run("checkpoint_overhead.py", *args, "--json", f"{tmp_path}/out")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out").read_text())["tasks"]["mlp-digits"]
    assert found["checkpoint_bytes"] > 4 * 4810


@pytest.mark.slow
def test_runs_under_faults_end_in_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    args = ("--events", "3", "--events-a-run", "3", "--epochs", "30", "--json", f"{tmp_path}/out")
    done = run("faults.py", *args)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out").read_text())["summary"]
    assert found["events"] >= 3
    assert found["runs"] == found["finished"] == found["same_samples"] == found["same_bits"]
