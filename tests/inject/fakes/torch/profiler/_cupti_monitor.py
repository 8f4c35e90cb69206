"""torch's own reader of CUPTI's buffers."""

import fakegpu


class CuptiMonitor:
    def start(self):
        assert fakegpu.guest_begin() == 0, "another subscriber is in the way"

    def stop(self):
        self.kernels_count = fakegpu.guest_end()
