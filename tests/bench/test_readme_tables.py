from keepmask.bench.readme_tables import by_machine

AMX = {"cores": 2, "features": ["avx2", "avx512f", "avx512_bf16", "amx_bf16"]}
ZEN = {"cores": 2, "features": ["avx2", "avx512f", "avx512_bf16"]}


def test_rows_fall_apart_by_what_the_machine_can_do():
    rows = [AMX | {"op": 1}, ZEN | {"op": 2}, AMX | {"op": 3}]
    found = by_machine(rows)
    assert {where: [row["op"] for row in own] for where, own in found.items()} == {
        "2 shared cores (AVX-512, its bfloat16, AMX)": [1, 3],
        "2 shared cores (AVX-512, its bfloat16, without AMX)": [2],
    }
