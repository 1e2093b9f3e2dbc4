package background

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// disksByName are the disks of which this process has a budget. They are protected by turns.
var disksByName = map[string]*disk{}

// On returns the budget of a new task that uses open files or block devices, on the disks below them. While others use the disks, the
// task reads and writes at most a number of bytes per second.
func On(bytesPerSecond int64, files ...*os.File) *Budget {
	var names []string
	for _, f := range files {
		names = append(names, disksBelow(f)...)
	}
	slices.Sort(names)
	b := &Budget{rate: bytesPerSecond}
	turns.Lock()
	defer turns.Unlock()
	for _, name := range slices.Compact(names) {
		if disksByName[name] == nil {
			disksByName[name] = &disk{requests: func() (uint64, uint64, bool) { return requestsOf(name) }}
		}
		b.shares = append(b.shares, share{disk: disksByName[name]})
	}
	return b
}

// disksBelow returns the names of the disks below a file or a device: their numbers. If they are not known, it is a name of the
// filesystem, so that all tasks on it share a budget.
func disksBelow(f *os.File) []string {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return []string{f.Name()}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return disksOf(number(st.Rdev))
	}
	if uuid, err := sys.BtrfsUUID(f); err == nil { // st_dev belongs to a subvolume
		return btrfsDisks(fmt.Sprintf("%x-%x-%x-%x-%x", uuid[:4], uuid[4:6], uuid[6:8], uuid[8:10], uuid[10:]))
	}
	return disksOf(number(st.Dev))
}

// number formats the number of a device as sysfs does.
func number(dev uint64) string { return fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev)) }

// btrfsDisks returns the disks of the btrfs with a UUID.
func btrfsDisks(uuid string) (names []string) {
	files, _ := filepath.Glob("/sys/fs/btrfs/" + uuid + "/devices/*/dev")
	for _, file := range files {
		if n, err := os.ReadFile(file); err == nil {
			names = append(names, disksOf(strings.TrimSpace(string(n)))...)
		}
	}
	if len(names) == 0 {
		return []string{uuid}
	}
	return names
}

// disksOf returns the disks of a block device, which may be a partition, or consist of other devices.
func disksOf(number string) (names []string) {
	dir, err := filepath.EvalSymlinks("/sys/dev/block/" + number)
	if err != nil {
		return []string{number}
	}
	if _, err := os.Stat(dir + "/partition"); err == nil {
		dir = filepath.Dir(dir)
	}
	files, _ := filepath.Glob(dir + "/slaves/*/dev")
	for _, file := range files {
		if n, err := os.ReadFile(file); err == nil {
			names = append(names, disksOf(strings.TrimSpace(string(n)))...)
		}
	}
	if len(names) > 0 {
		return names
	}
	if n, err := os.ReadFile(dir + "/dev"); err == nil {
		return []string{strings.TrimSpace(string(n))}
	}
	return []string{number}
}

// requestsOf returns the number of requests that the disk with a number has completed since the kernel has found it, and of those in flight.
// ok is false if the kernel does not count them (queue/iostats in Documentation/ABI/stable/sysfs-block of Linux).
func requestsOf(number string) (completed, inFlight uint64, ok bool) {
	dir := "/sys/dev/block/" + number
	counts, err := os.ReadFile(dir + "/queue/iostats")
	if err != nil || strings.TrimSpace(string(counts)) == "0" {
		return 0, 0, false
	}
	text, err := os.ReadFile(dir + "/stat")
	fields := strings.Fields(string(text))
	if err != nil || len(fields) < 9 {
		return 0, 0, false
	}
	for i, field := range fields {
		n, _ := strconv.ParseUint(field, 10, 64)
		switch i { // Documentation/block/stat.rst of Linux
		case 0, 4, 11, 15: // reads, writes, discards, flushes
			completed += n
		case 8:
			inFlight = n
		}
	}
	return completed, inFlight, completed+inFlight > 0
}
