//go:build vm

package crash

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// loggedDisk is a disk whose writes the kernel logs when a flush has made them durable, or when a write is durable itself
// (Documentation/admin-guide/device-mapper/log-writes.rst in Linux). So the disk may contain the first entries of the log,
// and nothing else, after a power failure.
type loggedDisk struct {
	disk, log string // the device nodes of the disk and of the one with the log
}

const (
	// loggedDevice is the device through which the disk is used.
	loggedDevice = "/dev/mapper/power"
	// loggedSize is the size in bytes of the part of the disk that is used.
	loggedSize = 4 << 30
)

// newLoggedDisk returns an empty disk, which is the last but one of the virtual machine, and begins its log on the last one.
func newLoggedDisk(t *testing.T) *loggedDisk {
	t.Helper()
	disks, err := filepath.Glob("/dev/vd[b-z]")
	if err != nil || len(disks) < 2 {
		t.Fatalf("got disks %q, %v, want at least one and another one for its log", disks, err)
	}
	d := &loggedDisk{disk: disks[len(disks)-2], log: disks[len(disks)-1]}
	d.erase(t)
	testenv.Run(t, "dmsetup", "create", filepath.Base(loggedDevice), "--table", d.table("log-writes "+d.disk+" "+d.log))
	t.Cleanup(func() {
		testenv.Run(t, "dmsetup", "remove", "--retry", filepath.Base(loggedDevice))
		d.erase(t)
	})
	// Without this mark, the log of a label of a physical volume would look like a label of the log disk.
	d.mark(t)
	return d
}

// table returns a table of the device mapper with a target.
func (*loggedDisk) table(target string) string { return fmt.Sprintf("0 %d %s", loggedSize/512, target) }

// erase makes the disk read as zeros. The disks of a virtual machine are sparse files, and a discard punches a hole.
func (d *loggedDisk) erase(t *testing.T) {
	t.Helper()
	testenv.Run(t, "blkdiscard", "--force", "--length", strconv.Itoa(loggedSize), d.disk)
}

// mark adds a mark to the log. The entries before it are durable at this moment.
func (d *loggedDisk) mark(t *testing.T) {
	t.Helper()
	testenv.Run(t, "dmsetup", "message", loggedDevice, "0", "mark", "mark")
}

// end ends the log and returns its entries.
func (d *loggedDisk) end(t *testing.T) []logEntry {
	t.Helper()
	testenv.Run(t, "dmsetup", "suspend", "--nolockfs", loggedDevice)
	testenv.Run(t, "dmsetup", "load", loggedDevice, "--table", d.table("linear "+d.disk+" 0"))
	testenv.Run(t, "dmsetup", "resume", loggedDevice)
	testenv.Run(t, "blockdev", "--flushbufs", d.log)
	f, err := os.Open(d.log)
	must(t, err)
	defer f.Close()
	entries, err := readLog(f)
	must(t, err)
	return entries
}

// restore gives the disk the content that entries have written.
func (d *loggedDisk) restore(t *testing.T, entries []logEntry) {
	t.Helper()
	d.erase(t)
	log, err := os.Open(d.log)
	must(t, err)
	defer log.Close()
	disk, err := os.OpenFile(d.disk, os.O_RDWR, 0)
	must(t, err)
	defer disk.Close()
	dirty := map[int64]bool{} // the MiB of the disk that were written, by number; the others read as zeros
	for _, e := range entries {
		skip := e.zero
		for n := e.at >> 20; n<<20 < e.at+e.size; n++ {
			skip = skip && !dirty[n]
			dirty[n] = dirty[n] || !e.zero
		}
		if skip {
			continue
		}
		_, err := io.Copy(io.NewOffsetWriter(disk, e.at), io.NewSectionReader(log, e.data, e.size))
		must(t, err)
	}
	for _, device := range []string{d.disk, loggedDevice} {
		testenv.Run(t, "blockdev", "--flushbufs", device)
	}
}

// logEntry is an entry of the log: the write of some bytes, a flush or a mark.
type logEntry struct {
	at, size int64 // of the bytes; a discard has none, because a disk may ignore it
	data     int64 // the offset of the bytes in the log
	zero     bool  // all bytes are zero
	mark     bool
	durable  bool // all entries before were flushed, or the write itself was durable
}

// The flags of entries.
const (
	logFlush = 1 << iota
	logFUA
	logDiscard
	logMark
)

// readLog parses a log.
func readLog(log io.ReaderAt) (entries []logEntry, err error) {
	var super struct {
		Magic, Version, Entries uint64
		SectorSize              uint32
	}
	if err := binary.Read(io.NewSectionReader(log, 0, 512), binary.LittleEndian, &super); err != nil {
		return nil, err
	}
	if super.Magic != 0x6a736677736872 || super.Version != 1 {
		return nil, fmt.Errorf("got the superblock %+v of a log of writes, want version 1", super)
	}
	sector := int64(super.SectorSize)
	at := sector
	for range super.Entries {
		var e struct{ Sector, Sectors, Flags, DataLen uint64 }
		if err := binary.Read(io.NewSectionReader(log, at, sector), binary.LittleEndian, &e); err != nil {
			return nil, err
		}
		at += sector
		entry := logEntry{at: int64(e.Sector) * sector, data: at, mark: e.Flags&logMark != 0, durable: e.Flags&(logFlush|logFUA) != 0}
		if e.Flags&logDiscard == 0 {
			entry.size = int64(e.Sectors) * sector
		}
		content := make([]byte, entry.size)
		if _, err := log.ReadAt(content, at); err != nil {
			return nil, err
		}
		entry.zero = len(bytes.Trim(content, "\x00")) == 0
		at += entry.size
		entries = append(entries, entry)
	}
	return entries, nil
}

// mappedDevices returns the names of the mapped devices of a target of the device mapper; of all if it is empty.
func mappedDevices(t *testing.T, target string) (names []string) {
	t.Helper()
	args := []string{"ls"}
	if target != "" {
		args = append(args, "--target", target)
	}
	for line := range strings.Lines(testenv.Run(t, "dmsetup", args...)) {
		if name, number, ok := strings.Cut(strings.TrimSpace(line), "\t"); ok && strings.HasPrefix(number, "(") {
			names = append(names, name)
		}
	}
	return names
}
