// Sequences out of arrays: what they say, and that bad arrays are refused before anything is kept.
#include "harness.h"
#include "kvreclaim/batch.h"

namespace kvreclaim::tests {

namespace {

constexpr int64_t kSize = 16;

struct Arrays {
  int64_t width;
  std::vector<int32_t> table{}, starts{0}, lengths{}, shifts{};

  BatchArrays view() const {
    return {table.data(), starts.data(), lengths.data(), shifts.data(), (int64_t)lengths.size(), width};
  }
};

// Sequences of any lengths up to their width, 0 among them; what lies past a row's last block is -1.
Arrays random_arrays(Random& random, int64_t count, int64_t width) {
  Arrays a{width};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = random.below(width * kSize + 1);
    for (int64_t b = 0; b < width; ++b) a.table.push_back(b * kSize < length ? (int32_t)random.below(1000) : -1);
    a.starts.push_back(a.starts.back() + (int32_t)random.below(length + 1));
    a.lengths.push_back((int32_t)length);
    a.shifts.push_back((int32_t)random.below(100));
  }
  return a;
}

void refuse(const Arrays& a, const char* what) {
  std::vector<SequenceView> sequences;
  int64_t max_block = -1;
  KVR_CHECK(append_sequences(a.view(), kSize, sequences, max_block) != nullptr, "%s was taken", what);
  KVR_CHECK(sequences.empty() && max_block == -1, "%s left something behind", what);
}

}  // namespace

KVR_TEST(sequences_say_what_the_arrays_say) {
  Random random(1);
  for (int64_t count : {0, 1, 7, 64}) {
    const Arrays a = random_arrays(random, count, 1 + random.below(9));
    std::vector<SequenceView> sequences;
    int64_t max_block = -1, highest = -1;
    KVR_CHECK(append_sequences(a.view(), kSize, sequences, max_block) == nullptr, "good arrays were refused");
    KVR_CHECK((int64_t)sequences.size() == count, "%zu sequences", sequences.size());
    for (int64_t i = 0; i < count; ++i) {
      const SequenceView& seq = sequences[(size_t)i];
      KVR_CHECK(seq.first_row == a.starts[i] && seq.first_row + seq.query_len == a.starts[i + 1], "rows of %ld", (long)i);
      KVR_CHECK(seq.seq_len == a.lengths[i] && seq.shift == a.shifts[i], "length of %ld", (long)i);
      KVR_CHECK(seq.positions.data == nullptr, "positions of %ld", (long)i);
      for (int64_t b = 0; b * kSize < seq.seq_len; ++b) {
        KVR_CHECK(seq.block_ids[b] == a.table[i * a.width + b], "block %ld of %ld", (long)b, (long)i);
        if (seq.block_ids[b] > highest) highest = seq.block_ids[b];
      }
    }
    KVR_CHECK(max_block == highest, "highest block %ld, not %ld", (long)max_block, (long)highest);
  }
}

KVR_TEST(bad_arrays_are_refused) {
  const Arrays good{2, {3, 4, 5, 6}, {0, 1, 3}, {20, 32}, {0, 0}};
  Arrays bad = good;
  bad.starts[0] = 1;
  refuse(bad, "a first row that is not 0");
  bad = good, bad.starts = {0, 3, 2};
  refuse(bad, "a descending row");
  bad = good, bad.starts = {0, 1, 34};
  refuse(bad, "more rows than tokens");
  bad = good, bad.lengths[1] = 33;
  refuse(bad, "a sequence longer than its blocks");
  bad = good, bad.lengths[0] = -1;
  refuse(bad, "a negative length");
  bad = good, bad.table[3] = -1;
  refuse(bad, "a negative block");
}

}  // namespace kvreclaim::tests
