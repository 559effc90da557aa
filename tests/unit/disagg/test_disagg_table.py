"""The plan as text."""

from __future__ import annotations

import pytest

from disagg import generate, parse_nodes, plan, ranges, rank_list, table


def test_a_row_for_each_rank() -> None:
    made = generate("disaggregated", 6, control_ranks=2, gen_tp_size=3)
    text = table(plan(made, 6, parse_nodes("alpha:3,b:3")))
    assert text == (
        "6 ranks on 2 nodes: 2 control, 4 workers; 1 ctx instance, 1 gen instance\n"
        "2 TP groups, none over several nodes\n"
        "\n"
        "rank  node   device  roles    inst  tp  pp  ep\n"
        "   0  alpha       -  harness     -   -   -   -\n"
        "   1  alpha       -  leader      -   -   -   -\n"
        "   2  alpha       0  ctx         0   0   0   0\n"
        "   3  b           0  gen         1   0   0   0\n"
        "   4  b           1  gen         1   1   0   0\n"
        "   5  b           2  gen         1   2   0   0\n"
    )


def test_the_table_counts_splits() -> None:
    text = table(plan(generate("aggregated", 3, tensor_parallelism=2), 3, ["a", "a", "b"]))
    assert "1 TP group, 1 unavoidable split over nodes\n" in text


def test_a_large_world_is_condensed() -> None:
    nodes = parse_nodes(",".join(f"n{i}:8" for i in range(1024)))
    text = table(
        plan(generate("disaggregated", 8192, num_ctx_servers=1023, ctx_tp_size=2, gen_tp_size=8), 8192, nodes)
    )
    assert text == (
        "8192 ranks on 1024 nodes: 2 control, 8190 workers; 1023 ctx instances, 768 gen\n"
        "  instances\n"
        "1791 TP groups, none over several nodes\n"
        "\n"
        "rank  node  roles\n"
        "   0  n0    harness\n"
        "   1  n0    leader\n"
        "\n"
        "instances  role  tp  pp  ep      ranks  nodes\n"
        "0-1022     ctx    2   1   1     2-2047  n0 ... n255 (256)\n"
        "1023-1790  gen    8   1   1  2048-8191  n256 ... n1023 (768)\n"
        "\n"
        "nodes                 slots  control  ctx  gen\n"
        "n0                        8        2    6    0\n"
        "n1 ... n255 (255)         8        0    8    0\n"
        "n256 ... n1023 (768)      8        0    0    8\n"
    )


def test_a_medium_world_shows_which_instances_are_on_which_node() -> None:
    nodes = ["h", "h"] + ["a"] * 32 + ["b"] * 32
    text = table(plan(generate("aggregated", 66, tensor_parallelism=4), 66, nodes))
    rows = [row.split() for row in text.splitlines() if "executor  " in row]
    assert rows == [
        ["0-7", "executor", "4", "1", "1", "2-33", "a"],
        ["8-15", "executor", "4", "1", "1", "34-65", "b"],
    ]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([7, 1, 2, 4, 3, 2], "1-4, 7"),
        ([1, 3, 5, 7], "1, 3, 5, 7"),
        ([1, 3, 5, 7, 9, 10], "1, 3, 5, 7, ..."),
    ],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers, ", ", max_ranges=4) == text
    assert ranges(numbers) == text.replace(" ", "").replace("...", "9-10")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3 on h2"),
        ([5, 4], "host h3 (ranks 4-5)"),
        ([6], "rank 6 on h4"),
        ([1, 2, 4, 5], "rank 1 on h1; rank 2 on h2 and host h3 (ranks 4-5)"),
        ([2, 3, 7], "host h2 (ranks 2-3) and rank 7"),  # 7 has not joined
    ],
)
def test_a_list_of_ranks_names_their_hosts(ranks: list[int], text: str) -> None:
    hosts = {rank: f"h{rank // 2 + 1}" for rank in range(7)}
    assert rank_list(ranks, hosts) == text
    assert rank_list(ranks, dict.fromkeys(range(7), "h1")) == rank_list(ranks)
    many = rank_list(range(20), {rank: f"h{rank}" for rank in range(20)})
    assert many.startswith("rank 0 on h0; rank 1 on h1;") and many.endswith(" and ranks on 12 more hosts")


def test_a_list_of_ranks_of_one_host() -> None:
    assert rank_list([3]) == "rank 3" and rank_list([7, 1, 2, 3, 3]) == "ranks 1-3, 7"


def test_the_head_goes_on_in_the_next_line_at_a_word() -> None:
    made = plan(generate("aggregated", 9), 21, ["a"] * 21, 1, 12)
    head = table(made).partition("\n\n")[0].splitlines()
    assert max(map(len, head)) <= 80 and len(head) == 2
    assert " ".join(map(str.strip, head)).startswith(
        "21 ranks on 1 node: 1 control, 12 owners of context servers"
    )
