// SPDX-License-Identifier: Apache-2.0
// The threads that share the work of a kernel call.
#pragma once
#include <cstdint>

namespace baton {

// Computes items from .. to - 1 of what ``context`` describes.
using Body = void (*)(const void* context, int64_t from, int64_t to);

// Runs ``body`` over items 0 .. items - 1, on the calling thread and on those helpers that are there. Neighbouring items
// go to the same thread as far as possible: weights are then one stream of memory for each. The caller waits for a
// helper only while that computes, never for it to come: a core that others keep busy costs no more than its help.
// One thread of a process calls this at a time, and not from within a body.
void share(int64_t items, Body body, const void* context);

// What a process tells the others of its machine, in memory that all of them see.
struct Member {
  uint32_t threads;  // that it computes on, of its own
  uint32_t busy;     // not 0 while it computes
};

// How many threads compute: ``own`` in any case, that of the caller included, and up to ``borrowed`` more on processors
// that others leave idle. ``members``, ``count``: everybody on this machine who computes, this process among them as
// ``self``. ``processors``: how many all of them share; what the own threads of those who are busy leave over, they
// borrow in equal parts. Called between two calls of ``share``, any number of times; ``members`` stays valid.
void set_threads(int own, int borrowed, int processors, const Member* members, int count, int self);

// How many threads the next call of ``share`` may have.
int threads_now();

}  // namespace baton
