#include "fletcher.h"

namespace fastdeploy_rl {

namespace {

// The divisions are made before the products can wrap.
uint64_t triangular(uint64_t z) { return z % 2 == 0 ? z / 2 * (z + 1) : z * (z / 2 + 1); }

uint64_t tetrahedral(uint64_t z) {
  uint64_t factors[3] = {z, z + 1, z + 2};
  factors[z % 2 == 0 ? 0 : 1] /= 2;
  // Of three neighbours one is a multiple of 3, and halving does not change which.
  for (uint64_t& factor : factors) {
    if (factor % 3 != 0) continue;
    factor /= 3;
    break;
  }
  return factors[0] * factors[1] * factors[2];
}

// With p counted from the end inside a lane, k = p L - l. The weights k, T2(k), T3(k) written in the basis 1, p, T2(p),
// T3(p).
struct LaneWeights {
  uint64_t b_of_a;
  uint64_t c_of_b, c_of_a;
  uint64_t d_of_c, d_of_b, d_of_a;
};

template <int64_t L>
constexpr LaneWeights lane_weights(int64_t l) {
  return {static_cast<uint64_t>(-l),
          static_cast<uint64_t>((L - L * L - 2 * L * l) / 2),
          static_cast<uint64_t>((l * l - l) / 2),
          static_cast<uint64_t>(L * L - L * L * L - L * L * l),
          static_cast<uint64_t>((L * L * L + 3 * L * L * l + 3 * L * l * l - 3 * L * L - 6 * L * l + 2 * L) / 6),
          static_cast<uint64_t>(-(l * (l - 1) * (l - 2)) / 6)};
}

template <int64_t L>
struct LaneTable {
  LaneWeights of[L]{};
  constexpr LaneTable() {
    for (int64_t lane = 0; lane < L; ++lane) of[lane] = lane_weights<L>(lane);
  }
};

template <int64_t L>
Sums combine_lanes(const Lanes& lanes) {
  static constexpr LaneTable<L> table;
  Sums sums, plain;
  for (int64_t lane = 0; lane < L; ++lane) {
    const LaneWeights& weight = table.of[lane];
    const uint64_t a = lanes.a[lane], b = lanes.b[lane], c = lanes.c[lane];
    plain += {a, b, c, lanes.d[lane]};
    sums.b += weight.b_of_a * a;
    sums.c += weight.c_of_b * b + weight.c_of_a * a;
    sums.d += weight.d_of_c * c + weight.d_of_b * b + weight.d_of_a * a;
  }
  constexpr uint64_t length = L;
  return {plain.a, sums.b + length * plain.b, sums.c + length * length * plain.c,
          sums.d + length * length * length * plain.d};
}

}  // namespace

Gap::Gap(uint64_t num_words) : z(num_words), t2(triangular(num_words)), t3(tetrahedral(num_words)) {}

Sums shift(const Sums& sums, const Gap& gap) {
  return {sums.a, sums.b + gap.z * sums.a, sums.c + gap.z * sums.b + gap.t2 * sums.a,
          sums.d + gap.z * sums.c + gap.t2 * sums.b + gap.t3 * sums.a};
}

Sums combine(const Lanes& lanes, int num_lanes) {
  switch (num_lanes) {
    case 16:
      return combine_lanes<16>(lanes);
    case 8:
      return combine_lanes<8>(lanes);
    default:
      return {lanes.a[0], lanes.b[0], lanes.c[0], lanes.d[0]};
  }
}

Sums combine(const WeightedLanes& lanes, int num_lanes) {
  Sums sums = combine(lanes.plain, num_lanes);
  const Sums by_z = combine(lanes.by_z, num_lanes), by_t2 = combine(lanes.by_t2, num_lanes);
  sums.b += by_z.a;
  sums.c += by_z.b + by_t2.a;
  sums.d += by_z.c + by_t2.b + combine(lanes.by_t3, num_lanes).a;
  return sums;
}

}  // namespace fastdeploy_rl
