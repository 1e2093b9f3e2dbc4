package blockdev

import (
	"fmt"
	"os"
	"path/filepath"
)

// IOStat counts the completed requests of a device since it was created, and their bytes.
// Documentation/block/stat.rst of Linux.
type IOStat struct {
	Reads, ReadBytes, Writes, WrittenBytes uint64
	// BusyMilliseconds is the time during which the device had requests.
	BusyMilliseconds uint64
}

// statSector is the unit of sizes in the stat file, in bytes, for any sector size of the device.
const statSector = 512

// ReadIOStat reads the counters of the device at a path below /dev.
func ReadIOStat(device string) (s IOStat, err error) {
	file := filepath.Join("/sys/class/block", filepath.Base(device), "stat")
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
