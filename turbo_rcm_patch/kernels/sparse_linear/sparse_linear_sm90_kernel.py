"""Sparse-linear attention in 8 bits in Gluon for sm_90: three consumer warpgroups, each with its own producer warp.

    out = softmax(q kᵀ) v over the kept blocks + φ(q) key_weight / (ε Σ φ(q) + φ(q) Σ key_weight) · state + bias

The softmax and its products are those of attention_8bit_sm90_kernel.py. state comes from sparse_linear_prepass.py.
Every tile of QUERIES queries has its own list of key blocks, so consumers share nothing. Each consumer walks tiles of
queries on its own, with a ring of SLOTS slots that its producer fills through TMA, also ahead for the next tile. Apart
from the 8-bit queries, all operands of a tile have one size and go through the ring in this order. Key blocks run from
the list's last, the only one that may be cut, to its first:

    K V K V ... K V  q  state        each uses a slot once; state, [D, D] in 16 bits, in D / 64 pieces of 64 rows

The result is stored from the slot of the last piece of state. Without a linear branch there is no state, and that of q
takes its place. A result in e4m3 fills half of the slot. Programs that run together share heads, whose K and V
stay in L2. In the last round of tiles no program gets a second tile before every program has one.

The limit is L2 bandwidth: for D = 128 a tile of keys and values is 32 KiB for 4.2 MFLOP, 128 FLOP per byte. A dense
kernel, whose three consumers share each tile, reads a third of the bytes.

All barriers are mbarriers of one arrival. They are listed for use n = 0, 1, ... of a slot. Use i of the ring, counted
over all tiles, is use i // SLOTS of slot i % SLOTS. The slot of 8-bit queries is used once per tile.

    full   the producer's arrival, and the expected bytes. Phase n ends when use n has landed, so the consumer waits for
           parity n & 1.
    empty  the consumer's arrival, after all of its warps have read use n for the last time. For the last piece of state
           it comes within the next tile, after the result that replaced it has been stored. Before use n the producer
           waits for phase n - 1, of parity (n & 1) ^ 1. For n = 0 this passes at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..attention.attention_sm90_kernel import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    KEYS,
    PRODUCER_REGISTERS,
    QUERIES,
    make_barriers,
    opaque,
)
from ..attention.attention_tiles import LOG2_E
from ..attention_8bit.attention_8bit_sm90_kernel import MAGIC_BITS, mask_scores, sum_in_threads, weigh, weights_operand
from ..gluon_releases import jit, reinterpret, tma_load, tma_store
from ..linear.gemm_sm90_epilogue import sum_layout
from .sparse_linear_reference import EPSILON

SLOTS = gl.constexpr(4)  # per consumer
STATE_ROWS = gl.constexpr(64)  # per piece; in 16 bits a piece fills a slot
LOG2E = gl.constexpr(LOG2_E)
EPS = gl.constexpr(EPSILON)


@jit(do_not_specialize=["tokens", "heads", "tiles", "block_q", "width"])
def sparse_linear_attention_8bit_kernel(
    q, q_scale, k, k_scale, v, v_scale, wide, block_map, key_weight, state, bias, out,
    out_scale, tokens, heads, tiles, block_q, width,
):  # fmt: skip
    """Compute both branches and store their sum.

    q, wide, out: descriptors over [B, H, S, D] with blocks [1, 1, QUERIES, D]. wide: q in the 16-bit dtype of state.
        out: in this dtype or e4m3.
    out_scale: [B], by which the result is divided, or None.
    k: a descriptor over [B, H, S, D] with blocks [1, 1, KEYS, D].
    v: a descriptor over [B, H, D, T] with blocks [1, 1, D, KEYS].
    state: a descriptor over [B, H, D, D] with blocks [1, 1, STATE_ROWS, D].
    q_scale: [B, S, H]. k_scale: [B, H, ⌈S / KEYS⌉]. v_scale, key_weight: [B, H, D]. bias: [D] or None.
    key_weight, state and bias are None without a linear branch.
    block_map: [B, H, ⌈S / block_q⌉, width], ascending. block_q: a multiple of QUERIES.
    tiles: the number of tiles of queries in all heads.
    """
    HEAD_DIM: gl.constexpr = q.block_type.shape[3]
    q_smem = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, QUERIES, HEAD_DIM], q.layout)
    slots = gl.allocate_shared_memory(k.dtype, [CONSUMERS * SLOTS, 1, 1, KEYS, HEAD_DIM], k.layout)
    q_full = make_barriers(CONSUMERS)
    q_empty = make_barriers(CONSUMERS)
    full = make_barriers(CONSUMERS * SLOTS)
    empty = make_barriers(CONSUMERS * SLOTS)
    fence_async_shared()
    buffers = (q_smem, slots, q_full, q_empty, full, empty)
    sizes = (tokens, heads, tiles, block_q, width)
    vectors = (q_scale, k_scale, v_scale, key_weight, bias)
    loaded = (q, k, v, wide, state)
    gl.warp_specialize(
        [
            (_consume, (0, loaded, vectors, block_map, out, out_scale, buffers, sizes)),
            (_consume, (1, loaded, vectors, block_map, out, out_scale, buffers, sizes)),
            (_consume, (2, loaded, vectors, block_map, out, out_scale, buffers, sizes)),
            (_produce, (0, loaded, block_map, buffers, sizes)),
            (_produce, (1, loaded, block_map, buffers, sizes)),
            (_produce, (2, loaded, block_map, buffers, sizes)),
        ],
        [4, 4, 1, 1, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _tiles_of(INDEX: gl.constexpr, tiles):
    """Return the number of tiles of a consumer of this program."""
    first = INDEX * gl.num_programs(0) + gl.program_id(0)
    return gl.cdiv(tiles - first, CONSUMERS * gl.num_programs(0))


@gluon.jit
def _locate(INDEX: gl.constexpr, use, tokens):
    """Return the consumer's tile number ``use``: the index of its sample and head, sample · heads + head, and its first
    query."""
    tile = (use * CONSUMERS + INDEX) * gl.num_programs(0) + gl.program_id(0)
    row_tiles = gl.cdiv(tokens, QUERIES)
    return tile // row_tiles, tile % row_tiles * QUERIES


@gluon.jit
def _list_of(sample_head, row, block_map, sizes):
    """Return a pointer to a tile's list of blocks."""
    tokens, _heads, _tiles, block_q, width = sizes
    return block_map + (gl.cast(sample_head, gl.int64) * gl.cdiv(tokens, block_q) + row // block_q) * width


@gluon.jit
def _slot(INDEX: gl.constexpr, i):
    """Return, for a consumer's use i of its ring, the slot's index among all slots and the parity of the slot's use."""
    return INDEX * SLOTS + i % SLOTS, (i // SLOTS) & 1


@gluon.jit
def _view(slots, slot, x):
    """Return the beginning of a slot as a block of descriptor x. Triton 3.8 reinterprets whole slots alone."""
    PARTS: gl.constexpr = KEYS * slots.shape[4] // x.block_type.nbytes
    SHAPE: gl.constexpr = [PARTS, 1, 1, x.block_type.shape[2], x.block_type.shape[3]]
    return reinterpret(slots.index(slot), x.dtype, SHAPE, x.layout).index(0)


# ---------------------------------------------------------------------------------------------------------------------
# Producers
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(INDEX: gl.constexpr, loaded, block_map, buffers, sizes):
    q, k, v, wide, state = loaded
    q_smem, slots, q_full, q_empty, full, empty = buffers
    tokens, heads, tiles, _block_q, width = sizes
    PIECES: gl.constexpr = 0 if state is None else wide.block_type.shape[3] // STATE_ROWS
    i = 0  # uses so far, of all tiles
    for use in range(_tiles_of(INDEX, tiles)):
        sample_head, row = _locate(INDEX, use, tokens)
        sample, head = sample_head // heads, sample_head % heads
        kept_blocks = _list_of(sample_head, row, block_map, sizes)
        block = gl.load(kept_blocks + (width - 1))
        mbarrier.wait(q_empty.index(INDEX), (use & 1) ^ 1)
        mbarrier.expect(q_full.index(INDEX), q.block_type.nbytes)
        tma_load(q, [sample, head, row, 0], q_full.index(INDEX), q_smem.index(INDEX))
        for rest in range(width, 0, -1):
            key = block * KEYS
            block = gl.load(kept_blocks + gl.maximum(rest - 2, 0))  # early, before there is a slot for it
            _fill(k, [sample, head, key, 0], INDEX, i, slots, full, empty)
            _fill(v, [sample, head, 0, key], INDEX, i + 1, slots, full, empty)
            i += 2
        _fill(wide, [sample, head, row, 0], INDEX, i, slots, full, empty)
        for piece in gl.static_range(PIECES):
            _fill(state, [sample, head, piece * STATE_ROWS, 0], INDEX, i + 1 + piece, slots, full, empty)
        i += 1 + PIECES


@gluon.jit
def _fill(x, corner, INDEX: gl.constexpr, i, slots, full, empty):
    slot, parity = _slot(INDEX, i)
    mbarrier.wait(empty.index(slot), parity ^ 1)
    mbarrier.expect(full.index(slot), x.block_type.nbytes)
    tma_load(x, corner, full.index(slot), _view(slots, slot, x))


# ---------------------------------------------------------------------------------------------------------------------
# Consumers
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _consume(INDEX: gl.constexpr, loaded, vectors, block_map, out, out_scale, buffers, sizes):
    _q, _k, v, wide, state = loaded
    q_scale, k_scale, v_scale, key_weight, bias = vectors
    q_smem, slots, q_full, q_empty, full, empty = buffers
    tokens, heads, tiles, _block_q, width = sizes
    HEAD_DIM: gl.constexpr = out.block_type.shape[3]
    PIECES: gl.constexpr = 0 if state is None else HEAD_DIM // STATE_ROWS
    SCORES: gl.constexpr = sum_layout(KEYS, 8)
    OUTPUT: gl.constexpr = sum_layout(HEAD_DIM, 8)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    no_output = gl.zeros([QUERIES, HEAD_DIM], gl.float32, OUTPUT)
    i = 0  # uses so far, of all tiles
    for use in range(_tiles_of(INDEX, tiles)):
        sample_head, row = _locate(INDEX, use, tokens)
        kept_blocks = _list_of(sample_head, row, block_map, sizes)
        block = gl.load(kept_blocks + (width - 1))
        rows = row + opaque(gl.arange(0, QUERIES, layout=ROWS))
        row_scales = q_scale + (gl.cast(sample_head // heads, gl.int64) * tokens + rows) * heads + sample_head % heads
        row_scale = gl.load(row_scales, mask=rows < tokens, other=1.0)
        key_scales = k_scale + sample_head * gl.cdiv(tokens, KEYS)
        mbarrier.wait(q_full.index(INDEX), use & 1)
        queries = q_smem.index(INDEX).reshape([QUERIES, HEAD_DIM])
        row_max = gl.full([QUERIES], float("-inf"), gl.float32, ROWS)
        row_sum = sum_in_threads(gl.zeros([QUERIES, KEYS], gl.float32, SCORES))
        acc = gl.zeros([QUERIES, HEAD_DIM], gl.float32, OUTPUT)
        for rest in range(width, 0, -1):
            slot, parity = _slot(INDEX, i)
            start = gl.full([QUERIES, KEYS], MAGIC_BITS, gl.int32, SCORES)
            mbarrier.wait(full.index(slot), parity)
            keys_t = slots.index(slot).reshape([KEYS, HEAD_DIM]).permute((1, 0))
            scores = warpgroup_mma(queries, keys_t, start, is_async=True)
            key_scale = gl.load(key_scales + block)
            first_key = block * KEYS
            block = gl.load(kept_blocks + gl.maximum(rest - 2, 0))
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(empty.index(slot))
            scores = scores.to(gl.float32, bitcast=True)
            if rest == width:  # this branch also keeps ptxas from moving the release below the softmax
                if use > 0:
                    tma.store_wait(0)
                    mbarrier.arrive(empty.index(_slot(INDEX, i - 1)[0]))  # the last tile's result has been stored
                scores = mask_scores(scores, tokens - first_key)
            weights, row_max, row_sum, correction = weigh(scores, row_scale * key_scale, row_max, row_sum)
            p = weights_operand(weights, OUTPUT)
            slot, parity = _slot(INDEX, i + 1)
            mbarrier.wait(full.index(slot), parity)
            values = _view(slots, slot, v).reshape([HEAD_DIM, KEYS]).permute((1, 0))
            product = warpgroup_mma(p, values, no_output, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(empty.index(slot))
            acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, OUTPUT))[:, None] + product
            i += 2
        mbarrier.arrive(q_empty.index(INDEX))

        # Computed again, and opaque: then neither the loop nor the linear branch holds it in registers.
        sample_head, _row = _locate(INDEX, opaque(use), tokens)
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROWS)
        acc = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, OUTPUT))[:, None]
        acc = acc * _load_columns(v_scale, sample_head * HEAD_DIM, HEAD_DIM, OUTPUT)
        acc = gl.convert_layout(acc, sum_layout(HEAD_DIM, 16), assert_trivial=True)
        if state is None:
            slot, parity = _slot(INDEX, i)
            mbarrier.wait(full.index(slot), parity)
        else:
            acc = _add_linear_branch(acc, key_weight, sample_head, INDEX, i, slots, full, empty, wide, state)
        if PIECES == 2:
            mbarrier.arrive(empty.index(_slot(INDEX, i + 1)[0]))
        if bias is not None:
            columns = _load_columns(bias, sample_head * 0, HEAD_DIM, sum_layout(HEAD_DIM, 16))
            acc = acc + columns.to(gl.float32)
        if out_scale is not None:
            acc = acc * (1.0 / gl.load(out_scale + sample_head // heads))
        staged = _view(slots, _slot(INDEX, i + PIECES)[0], out)
        staged.reshape([QUERIES, HEAD_DIM]).store(acc.to(out.dtype))
        fence_async_shared()
        sample_head, row = _locate(INDEX, opaque(use), tokens)
        tma_store(out, [sample_head // heads, sample_head % heads, row, 0], staged)
        i += 1 + PIECES
    tma.store_wait(0)


@gluon.jit
def _add_linear_branch(acc, key_weight, sample_head, INDEX: gl.constexpr, i, slots, full, empty, wide, state):
    """Return acc [QUERIES, D] + φ(q) key_weight / (the branch's denominator) · state, with the ring's uses from i on.

    A row of φ may be scaled by any factor. Here the factor makes its sum with key_weight + ε one. The registers have no
    room for all weights beside acc, so q is read again for each step. The waits in between stop the compiler from
    keeping earlier reads.
    """
    HEAD_DIM: gl.constexpr = state.block_type.shape[3]
    PIECES: gl.constexpr = HEAD_DIM // STATE_ROWS
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout(HEAD_DIM, 16), k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, sum_layout(STATE_ROWS, 16))
    slot_of_q, parity_of_q = _slot(INDEX, i)
    q = _view(slots, slot_of_q, wide).reshape([QUERIES, HEAD_DIM])
    mbarrier.wait(full.index(slot_of_q), parity_of_q)
    offset = gl.full([QUERIES], float("inf"), gl.float32, ROWS)  # added to exponents, so that none is above 0
    for piece in gl.static_range(PIECES):
        offset = gl.minimum(offset, gl.max(_piece_of_q(q, piece), 1) * -LOG2E)
    total = gl.zeros([QUERIES], gl.float32, ROWS)
    for piece in gl.static_range(PIECES):
        mbarrier.wait(full.index(slot_of_q), parity_of_q)
        weight = _piece_of_weight(key_weight, sample_head, HEAD_DIM, piece) + EPS
        total += gl.sum(_exponentials(q, offset, piece) * weight, 1)
    offset -= gl.log2(total)
    for piece in gl.static_range(PIECES):
        slot, parity = _slot(INDEX, i + 1 + piece)
        mbarrier.wait(full.index(slot), parity)
        weights = _exponentials(q, offset, piece) * _piece_of_weight(key_weight, sample_head, HEAD_DIM, piece)
        operand = gl.convert_layout(weights.to(state.dtype), OPERAND, assert_trivial=True)
        part = _view(slots, slot, state).reshape([STATE_ROWS, HEAD_DIM])
        acc = warpgroup_mma(operand, part, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(slot_of_q))
    return acc


@gluon.jit
def _piece_of_q(q, PIECE: gl.constexpr):
    """Load STATE_ROWS columns of q in fp32."""
    return q.slice(PIECE * STATE_ROWS, STATE_ROWS, dim=1).load(sum_layout(STATE_ROWS, 16)).to(gl.float32)


@gluon.jit
def _exponentials(q, offset, PIECE: gl.constexpr):
    return gl.exp2(_piece_of_q(q, PIECE) * LOG2E + offset[:, None])


@gluon.jit
def _piece_of_weight(key_weight, sample_head, HEAD_DIM: gl.constexpr, PIECE: gl.constexpr):
    first = sample_head * HEAD_DIM + PIECE * STATE_ROWS
    return _load_columns(key_weight, first, STATE_ROWS, sum_layout(STATE_ROWS, 16))


@gluon.jit
def _load_columns(pointer, first, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load [1, COLUMNS] from ``first`` on, a multiple of 8, in the layout of a sum.

    A thread's elements are at constant distances from one address. `opaque` keeps the addresses inside the loop over
    tiles.
    """
    grouped = gl.zeros([COLUMNS], gl.int32, gl.SliceLayout(0, LAYOUT)).reshape([COLUMNS // 8, 8])
    GROUPED: gl.constexpr = grouped.type.layout
    first = opaque(first // 8) * 8
    of_group = pointer + (first + gl.arange(0, 8, layout=gl.SliceLayout(0, GROUPED)))
    groups = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(1, GROUPED))
    values = gl.load(of_group[None, :] + (groups * 8)[:, None]).reshape([COLUMNS])
    return gl.convert_layout(values, gl.SliceLayout(0, LAYOUT), assert_trivial=True)[None, :]
