// Runs jobs: strided copies with an optional cast and with checksums taken in the same pass, spread over threads.
#pragma once

#include <vector>

#include "fletcher.h"
#include "job.h"

namespace fastdeploy_rl {

// std::invalid_argument when num_threads < 1. Sums of places that a job does not have are zero.
std::vector<JobSums> run_jobs(const std::vector<const Job*>& jobs, int num_threads);

}  // namespace fastdeploy_rl
