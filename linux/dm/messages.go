package dm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A command of lvm(8) that creates a volume in a thin pool first writes it to the metadata of the group, with the message
// "create" and a new transaction ID. Then it sends the kernel the message, and after it the transaction ID. If the command was
// killed between these two, each later command for the pool sends the message again. The kernel refuses a second create_snap
// with the same number (EEXIST), so all these commands fail.

// errQueued means that lvm(8) cannot send a message to a thin pool.
var errQueued = errors.New("a message to the thin pool failed")

// queued is a volume whose creation LVM has not completed.
type queued struct {
	// pool is the UUID of the thin pool's logical volume, and transaction the transaction ID of the pool in the metadata.
	pool        string
	transaction int64
	// number is the number of the volume in the pool.
	number int
}

// removeQueued removes the volumes whose creation LVM has not completed from the kernel's thin pools, so that LVM can create
// them. No program can have used them. It fails while another program changes the group.
func (g Group) removeQueued() error {
	unlock, err := g.lock()
	if err != nil {
		return err
	}
	defer unlock()
	for _, q := range queuedIn(g.metadata()) {
		pool := VolumeID{g.UUID, q.pool}
		t, ok, err := pool.ThinPool()
		if err != nil {
			return err
		}
		if !ok || t.Transaction != q.transaction-1 { // the kernel has completed it
			continue
		}
		if err := pool.send("delete %d", q.number); err != nil && !errors.Is(err, unix.ENODATA) {
			return err
		}
	}
	return nil
}

// lock takes LVM's lock of the group (lib/locking/file_locking.c of LVM). It fails if another program has the lock.
func (g Group) lock() (unlock func(), err error) {
	path := filepath.Join(lockDir, "V_"+g.Name)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o700)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil && !current(f, path) { // its last owner has removed it
		err = unix.EWOULDBLOCK
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	return func() { _ = f.Close() }, nil
}

// current reports whether a path names an open file.
func current(f *os.File, path string) bool {
	opened, err := f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(path)
	return err == nil && os.SameFile(opened, named)
}

// metadata returns the text of the group's metadata; empty if it cannot be read. A physical volume that was missing during a
// change has an older text.
func (g Group) metadata() (newest string) {
	latest := -1
	for _, device := range g.Devices {
		p, err := readLabel(device)
		if err != nil || p.groupUUID != g.UUID {
			continue
		}
		if n := sequence(p.metadata); n > latest {
			newest, latest = p.metadata, n
		}
	}
	return newest
}

// sequence returns the sequence number of the metadata of a group, which LVM increases with each change; 0 if it has none.
func sequence(metadata string) int {
	m := sequenceLine.FindStringSubmatch(metadata)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

// HasNamed reports whether a logical volume has the given name, active or not. It reads the metadata of the group itself, and
// starts no process. False if the metadata cannot be read.
func (g Group) HasNamed(name string, id VolumeID) bool {
	uuid, ok := volumeIn(g.metadata(), name)
	return ok && uuid == id.Volume
}

var (
	idLine          = regexp.MustCompile(`(?m)^id = "` + uuidPattern + `"$`)
	sequenceLine    = regexp.MustCompile(`(?m)^seqno = (\d+)$`)
	transactionLine = regexp.MustCompile(`(?m)^transaction_id = (\d+)$`)
	numberLine      = regexp.MustCompile(`(?m)^device_id = (\d+)$`)
	createMessage   = regexp.MustCompile(`(?m)^message\d+ \{\ncreate = "([^"]+)"\n\}$`)
)

// queuedIn returns the volumes in the metadata of a group whose creation is queued.
func queuedIn(metadata string) (all []queued) {
	volumes := volumesIn(metadata)
	for _, pool := range volumes {
		for _, create := range createMessage.FindAllStringSubmatch(pool, -1) {
			id, transaction := idLine.FindStringSubmatch(pool), transactionLine.FindStringSubmatch(pool)
			number := numberLine.FindStringSubmatch(volumes[create[1]])
			if id == nil || transaction == nil || number == nil {
				continue
			}
			q := queued{pool: id[1]}
			var err, numberErr error
			q.transaction, err = strconv.ParseInt(transaction[1], 10, 64)
			q.number, numberErr = strconv.Atoi(number[1])
			if err == nil && numberErr == nil && q.number < firstTemporary {
				all = append(all, q)
			}
		}
	}
	return all
}

// volumesIn returns the texts of the logical volumes in the metadata of a group, by name.
func volumesIn(metadata string) map[string]string {
	_, rest, _ := strings.Cut(metadata, "\nlogical_volumes {\n")
	volumes := map[string]string{}
	name, depth := "", 0
	var text strings.Builder
	for line := range strings.Lines(rest) {
		opened, opens := strings.CutSuffix(line, " {\n")
		switch {
		case opens && depth == 0:
			name = opened
			text.Reset()
		case line == "}\n" && depth == 1:
			volumes[name] = text.String()
		case depth > 0:
			text.WriteString(line)
		}
		if opens {
			depth++
		} else if line == "}\n" {
			if depth--; depth < 0 {
				break
			}
		}
	}
	return volumes
}
