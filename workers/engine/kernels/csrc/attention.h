// SPDX-License-Identifier: Apache-2.0
// Attention over the paged KV cache, for prompts and single tokens alike.
//
// Keys are taken in tiles of kTile positions that begin at multiples of kTile in the sequence, whatever the size of
// a block and wherever a chunk begins: the online softmax of a token then sees the same tiles in every step.
#pragma once
#include "tile.h"

namespace {

using baton::Attention;
using baton::Span;

constexpr int kTile = 2 * kPanel;

// How many positions ahead of the one being copied are fetched from memory.
constexpr int kAhead = 8;

// So many tokens are rotated and stored by one thread.
constexpr int kFewTokens = 16;

// Rows (tokens x heads of a group) that share the tiles which one thread has prepared.
constexpr int kQueryRows = 96;

inline int tokens_per_item(const Attention& op) { return larger(1, kQueryRows / (op.heads / op.kv_heads)); }

// x rotated to a position and scaled -> out, [dim] each.
inline void rotate(const float* x, const float* cos, const float* sin, int dim, float scale, float* __restrict out) {
  const int half = dim / 2;
  for (int i = 0; i < half; ++i) {
    const float one = x[i], other = x[i + half];
    out[i] = (one * cos[i] + other * sin[i]) * scale;
    out[i + half] = (other * cos[i + half] + one * sin[i + half]) * scale;
  }
}

inline void put(const float* from, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] = from[i];
}

// A multiple of eight, as halves. What a half cannot hold becomes NaN, so that the sequence ends in an error: an infinite
// key could quietly take its token out of the answer.
inline void put(const float* from, int count, uint16_t* to) {
  for (int i = 0; i < count; i += 8) narrow8(from + i, to + i);
}

// Rotate a token's queries into ``out`` and its keys into the cache, with its values. ``row``: [dim].
template <class T>
void take_in(const Attention& op, int token, float* row) {
  const int dim = op.dim, kv_heads = op.kv_heads;
  const float* x = op.qkv + static_cast<ptrdiff_t>(token) * (op.heads + 2 * kv_heads) * dim;
  const float* cos = op.cos + op.positions[token] * dim;
  const float* sin = op.sin + op.positions[token] * dim;
  float* out = op.out + static_cast<ptrdiff_t>(token) * op.heads * dim;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
  for (int head = 0; head < op.heads; ++head, x += dim) rotate(x, cos, sin, dim, scale, out + head * dim);
  const ptrdiff_t skip = static_cast<ptrdiff_t>(op.write_rows[token]) * kv_heads * dim;
  T* k = static_cast<T*>(op.k_cache) + skip;
  for (int head = 0; head < kv_heads; ++head, x += dim) {
    rotate(x, cos, sin, dim, 1.0f, row);
    put(row, dim, k + head * dim);
  }
  put(x, kv_heads * dim, static_cast<T*>(op.v_cache) + skip);
}

// Work of one thread at a time: ``count`` tokens of a span from ``offset`` on, the heads of one group.
struct Item {
  const Span* span;
  int offset, count, kv_head;
};

// The items of a step are numbered span by span, in each by token, then by group.
inline Item item_of(const Attention& op, int64_t number) {
  const int some = tokens_per_item(op);
  for (const Span* span = op.spans;; ++span) {
    const int64_t items = static_cast<int64_t>(blocks_of(span->count, some)) * op.kv_heads;
    if (number < items) {
      const int offset = static_cast<int>(number / op.kv_heads) * some;
      return {span, offset, smaller(some, span->count - offset), static_cast<int>(number % op.kv_heads)};
    }
    number -= items;
  }
}

// Where an item works.
struct Room {
  float* queries;  // [rows, dim]
  float* sums;     // [rows, padded]
  float* scores;   // [rows, kTile]
  float* keys;     // [kTile / kPanel, dim, kPanel]
  float* values;   // [kTile, padded]
  float* largest;  // [rows]
  float* totals;   // [rows]
  int padded;      // dim rounded up to whole panels

  Room(const Attention& op, float* memory) {
    const ptrdiff_t rows = tokens_per_item(op) * (op.heads / op.kv_heads);
    padded = blocks_of(op.dim, kPanel) * kPanel;
    queries = memory;
    sums = queries + rows * op.dim;
    scores = sums + rows * padded;
    keys = scores + rows * kTile;
    values = keys + op.dim * kTile;
    largest = values + kTile * padded;
    totals = largest + rows;
  }
  static size_t size(const Attention& op) {
    const Room room(op, nullptr);
    const ptrdiff_t rows = tokens_per_item(op) * (op.heads / op.kv_heads);
    return static_cast<size_t>(room.totals + rows - room.queries);
  }
};

// Keys (as columns, in panels) and values of positions ``from`` .. ``from + count - 1`` as floats. The last key is
// repeated up to a multiple of 8; nobody uses those scores.
template <class T>
void prepare_tile(const Attention& op, const Item& item, int from, int count, const Room& room) {
  // Copies: the compiler must assume that what is stored below changes what the references refer to.
  const int dim = op.dim, block_size = op.block_size, padded = room.padded;
  const ptrdiff_t row_size = static_cast<ptrdiff_t>(op.kv_heads) * dim, block_stride = op.block_rows * row_size;
  const T* k_cache = static_cast<const T*>(op.k_cache) + item.kv_head * dim;
  const T* v_cache = static_cast<const T*>(op.v_cache) + item.kv_head * dim;
  const int32_t* block = op.tables + item.span->table + from / block_size;
  const T* keys[kTile];
  const T* values[kTile + kAhead];
  for (int j = 0, slot = from % block_size; j < count; ++j) {
    const ptrdiff_t skip = *block * block_stride + slot * row_size;
    keys[j] = k_cache + skip;
    values[j] = v_cache + skip;
    if (++slot == block_size) {
      slot = 0;
      ++block;
    }
  }
  for (int j = count; j < count + kAhead; ++j) values[j] = values[count - 1];
  float* to = room.values;
  for (int j = 0; j < count; ++j, to += padded) {
    for (int i = 0; i < dim; i += 64 / static_cast<int>(sizeof(T))) {
      __builtin_prefetch(keys[j] + i);
      __builtin_prefetch(values[j + kAhead] + i);
    }
    for (int i = 0; i < dim; i += 8) widen8(values[j] + i, to + i);
  }
  const int whole = blocks_of(count, 8) * 8;
  for (int j = count; j < whole; ++j) keys[j] = keys[count - 1];
  for (int j = 0; j < whole; j += 8) {
    to = room.keys + j / kPanel * dim * kPanel + j % kPanel;
    for (int i = 0; i < dim; i += 8) transpose8(keys + j, i, to + i * kPanel, kPanel);
  }
}

// Make weights of a row of scores, the first ``count`` of which it may see; rescale what the row has so far.
inline void soften(float* scores, int count, float* sums, int padded, float* largest, float* total) {
  for (int j = count; j < kTile; ++j) scores[j] = -__builtin_inff();
  Wide low = load_wide(scores), high = load_wide(scores + kPanel), top = low;
  for (int j = 0; j < kVecs; ++j) top.v[j] = max(low.v[j], high.v[j]);
  const float before = *largest, here = reduce_max(top);
  const float now = before > here ? before : here;
  const Vec shift = set1(now);
  for (int j = 0; j < kVecs; ++j) {
    low.v[j] = exp(sub(low.v[j], shift));
    high.v[j] = exp(sub(high.v[j], shift));
  }
  store_wide(scores, low);
  store_wide(scores + kPanel, high);
  if (count < kTile) {
    for (int j = count; j < kTile; ++j) scores[j] = 0;
    low = load_wide(scores);
    high = load_wide(scores + kPanel);
  }
  float kept = *total;
  if (now != before) {
    alignas(64) float shrink[kWidth];
    store(shrink, exp(set1(before - now)));
    kept *= shrink[0];
    const Vec factor = set1(shrink[0]);
    for (int i = 0; i < padded; i += kWidth) store(sums + i, mul(load(sums + i), factor));
  }
  for (int j = 0; j < kVecs; ++j) low.v[j] = add(low.v[j], high.v[j]);
  *total = kept + reduce_add(low);
  *largest = now;
}

template <class T>
void attend(const Attention& op, const Item& item, const Room& room) {
  const int group = op.heads / op.kv_heads, rows = item.count * group, dim = op.dim, padded = room.padded;
  const ptrdiff_t token_size = static_cast<ptrdiff_t>(op.heads) * dim;
  float* out = op.out + (item.span->first + item.offset) * token_size + item.kv_head * group * dim;
  for (int r = 0; r < rows; ++r) {
    put(out + r / group * token_size + r % group * dim, dim, room.queries + r * dim);
    for (int i = 0; i < padded; ++i) room.sums[r * padded + i] = 0;
    room.largest[r] = -__builtin_inff();
    room.totals[r] = 0;
  }
  const int first = item.span->start + item.offset, end = first + item.count;
  for (int from = 0; from < end; from += kTile) {
    const int count = smaller(kTile, end - from);
    const int skipped = larger(0, from - first) * group;  // rows of tokens before this tile
    prepare_tile<T>(op, item, from, count, room);
    float* scores = room.scores + skipped * kTile;
    for (int j = 0; j < count; j += kPanel)
      tile(rows - skipped, room.queries + skipped * dim, dim, room.keys + j * dim, kPanel, dim, scores + j, kTile,
           false);
    for (int r = skipped; r < rows; ++r)
      soften(room.scores + r * kTile, smaller(kTile, first + r / group + 1 - from), room.sums + r * padded, padded,
             room.largest + r, room.totals + r);
    for (int i = 0; i < padded; i += kPanel)
      tile(rows - skipped, scores, kTile, room.values + i, padded, count, room.sums + skipped * padded + i, padded,
           true);
  }
  for (int r = 0; r < rows; ++r) {
    float* to = out + r / group * token_size + r % group * dim;
    for (int i = 0; i < dim; ++i) to[i] = room.sums[r * padded + i] / room.totals[r];
  }
}

template <class T>
void attention_of(const Attention& op) {
  int64_t items = 0;
  for (int s = 0; s < op.num_spans; ++s)
    items += static_cast<int64_t>(blocks_of(op.spans[s].count, tokens_per_item(op))) * op.kv_heads;
  // Few tokens are not worth a second thread here.
  const auto take_some = [&](int64_t from, int64_t to) {
    float* row = baton::scratch(static_cast<size_t>(op.dim));
    for (int64_t token = from; token < to; ++token) take_in<T>(op, static_cast<int>(token), row);
  };
  if (op.tokens > kFewTokens)
    in_parts(op.tokens, take_some);
  else
    take_some(0, op.tokens);
  // All keys are in the cache now. The last items of a prompt are the longest: they come first.
  in_parts(items, [&](int64_t from, int64_t to) {
    const Room room(op, baton::scratch(Room::size(op)));
    if (room.padded != op.dim)
      for (ptrdiff_t i = 0; i < kTile * static_cast<ptrdiff_t>(room.padded); ++i) room.values[i] = 0;
    for (int64_t number = from; number < to; ++number) attend<T>(op, item_of(op, items - 1 - number), room);
  });
}

void attention(const Attention& op) {
  if (op.dtype == Dtype::kHalf)
    attention_of<uint16_t>(op);
  else
    attention_of<float>(op);
}

}  // namespace
