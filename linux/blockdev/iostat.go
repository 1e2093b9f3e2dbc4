package blockdev

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// IOStat counts the completed requests of a device, and their bytes, since the kernel created the device. A loop
// device keeps its counters when it is bound to another file. LOOP_CTL_REMOVE would reset them, but takes 66 ms (Linux
// 6.18). Documentation/block/stat.rst of Linux.
type IOStat struct {
	Reads, ReadBytes, Writes, WrittenBytes uint64
	// BusyMilliseconds is the time during which the device had requests.
	BusyMilliseconds uint64
}

// statSector is the unit of sizes in the stat file, in bytes, for any sector size of the device.
const statSector = 512

// ReadIOStat reads the counters of the device at a path, which may be a link.
func ReadIOStat(device string) (s IOStat, err error) {
	number, err := NodeNumber(device)
	if err != nil {
		return s, err
	}
	file := fmt.Sprintf("/sys/dev/block/%d:%d/stat", unix.Major(number), unix.Minor(number))
	text, err := os.ReadFile(file)
	if err != nil {
		return s, err
	}
	var merged, sectorsRead, sectorsWritten, ticks uint64
	_, err = fmt.Sscan(string(text), &s.Reads, &merged, &sectorsRead, &ticks, &s.Writes, &merged, &sectorsWritten, &ticks, &ticks, &s.BusyMilliseconds)
	if err != nil {
		return IOStat{}, fmt.Errorf("%s: %w", file, err)
	}
	s.ReadBytes, s.WrittenBytes = sectorsRead*statSector, sectorsWritten*statSector
	return s, nil
}
