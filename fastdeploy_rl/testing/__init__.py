"""What this package's own tests use and yours may too: fakes that break on request, and exact interleavings."""

from fastdeploy_rl.testing.faulty_source import Corrupt as Corrupt
from fastdeploy_rl.testing.faulty_source import Delay as Delay
from fastdeploy_rl.testing.faulty_source import Fail as Fail
from fastdeploy_rl.testing.faulty_source import FaultySource as FaultySource
from fastdeploy_rl.testing.faulty_source import Vanish as Vanish
from fastdeploy_rl.testing.sequencer import Sequencer as Sequencer
from fastdeploy_rl.testing.step_faults import Act as Act
from fastdeploy_rl.testing.step_faults import StepFault as StepFault
from fastdeploy_rl.testing.step_faults import StepFaults as StepFaults
