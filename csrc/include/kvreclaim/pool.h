// Loops over independent items on several threads: on OpenMP's, which torch's loops have, too, while each has a core
// to itself. Where other programs hold cores, on a pool of our own: whoever begins a loop works on it and waits at its
// end for items that others have begun, never for a thread that has not got a core.
#pragma once

#include <cstdint>

namespace kvreclaim {

// How many threads share a loop that this thread begins, itself among them: torch's number, or the one given.
int max_threads();

// For loops that this thread begins from now on; 0: torch's number again.
void set_max_threads(int threads);

// Inside a body: a number below the max_threads() of the thread that began the loop, of its own for each that
// works on it.
int thread_index();

using ItemBody = void (*)(const void* context, int64_t item);

// body(context, item) for each item of [0, items), handed out one by one in ascending order. A loop begun inside a
// body, or while another thread's is under way, runs on the calling thread alone. The body must not throw.
void run_items(int64_t items, ItemBody body, const void* context);

// Whether loops have waited too long for threads without a core, so that for a while none is waited for.
bool lacks_cores();

// From now on, and for good, as if that had been found; false: as if nothing had been, but in a forked child.
void lack_cores(bool lacking);

}  // namespace kvreclaim
