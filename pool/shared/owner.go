package shared

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
)

// owner identifies this process to the others that write to the pool. The names of its entries in tmp
// contain its token. Its locked file in OwnersDir shows that the process lives.
type owner struct {
	mu    sync.Mutex
	token string
	file  *os.File
	// growing contains the entries of tmp that announce growth, by volume.
	growing map[string]string
}

// entry is the name of an entry of tmp: `<volume>.<owner>.<bytes><suffix>`. rest is
// `<bytes><suffix>`; bytes is the number of reserved bytes.
type entry struct{ volume, owner, rest string }

// growSuffix ends the name of an entry that announces growth.
const growSuffix = ".grow"

func parseEntry(s string) (e entry, ok bool) {
	e.volume, s, _ = strings.Cut(s, ".")
	e.owner, e.rest, ok = strings.Cut(s, ".")
	return e, ok
}

// bytes is the number of reserved bytes.
func (e entry) bytes() int64 {
	digits, _, _ := strings.Cut(e.rest, ".")
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// Entry returns the name in tmp for a volume or set that reserves some bytes. It begins with the name
// of the volume, or of the set without the suffix of groups.
func (e *Export) Entry(name string, bytes int64, suffix string) (string, error) {
	name, _, _ = strings.Cut(name, ".")
	token, err := e.token()
	return name + "." + token + "." + strconv.FormatInt(bytes, 10) + suffix, err
}

// SoleWriter is false. Even a process that counts as ended may still live and commit an entry.
func (e *Export) SoleWriter() bool { return false }

// token returns this process's token. The first call makes the process an owner.
func (e *Export) token() (string, error) {
	o := &e.owner
	o.mu.Lock()
	defer o.mu.Unlock()
	var err error
	// A sweep of another process may remove a file that is not locked yet.
	for try := 0; o.file == nil && try < 3; try++ {
		o.token = rand.Text()
		o.file, err = e.lockOwner(o.token, os.O_CREATE|os.O_EXCL)
	}
	if err != nil {
		return "", fmt.Errorf("pool %q: registering this process in %s: %w", e.Name, OwnersDir, err)
	}
	return o.token, nil
}

// lockOwner opens an owner's file with the flags flag, and locks it. EWOULDBLOCK means that the owner
// lives. If the server does not support locks, every process can become an owner, and no owner counts
// as ended.
func (e *Export) lockOwner(token string, flag int) (*os.File, error) {
	path := OwnersDir + "/" + token
	mode := uint32(0) // openat2(2) refuses a mode without O_CREAT
	if flag&os.O_CREATE != 0 {
		mode = 0o600
	}
	f, err := e.Files.Open(e.Dir, path, os.O_RDWR|flag, mode)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if flag&os.O_CREATE != 0 && NoLocks(err) {
		err = nil
	}
	if err == nil {
		_, err = e.Root.Lstat(path) // a sweep may have removed the file before it was locked
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Sweep discards the entries of ended processes. It reads tmp before OwnersDir: a process makes its
// file before its entries, so each entry of a living process that was read has an owner.
func (e *Export) Sweep(ctx context.Context) error {
	own, err := e.token()
	if err != nil {
		return err
	}
	names, err := beneath.Names(e.Tmp, ".")
	if err != nil {
		return err
	}
	owners, err := beneath.Names(e.Dir, OwnersDir)
	if err != nil {
		return err
	}
	if !slices.Contains(owners, own) { // another process concluded that this one has ended
		e.Disown()
	}
	for _, token := range owners {
		if token != own {
			err = errors.Join(err, e.sweepOwner(ctx, token, names))
		}
	}
	return errors.Join(err, e.sweepEntries(ctx, names, func(owner string) bool {
		return owner != own && !slices.Contains(owners, owner)
	}))
}

// sweepOwner discards the entries of an owner that has ended.
func (e *Export) sweepOwner(ctx context.Context, token string, names []string) error {
	f, err := e.lockOwner(token, 0)
	if errors.Is(err, unix.EWOULDBLOCK) || NoLocks(err) || beneath.IsGone(err) {
		return nil
	}
	switch {
	case err == nil:
		defer f.Close()
	case !errors.Is(err, beneath.ErrIrregular): // no owner made an irregular file
		return fmt.Errorf("pool %q: %w", e.Name, err)
	}
	if err := e.sweepEntries(ctx, names, func(owner string) bool { return owner == token }); err != nil {
		return err
	}
	if err := e.Root.Remove(OwnersDir + "/" + token); err != nil && !beneath.IsGone(err) {
		klog.FromContext(ctx).Error(err, "Removing the file of an ended owner failed; it is tried again later", "pool", e.Name)
	}
	return nil
}

// sweepEntries discards the entries of the ended owners, and those without an owner in their names.
func (e *Export) sweepEntries(ctx context.Context, names []string, ended func(owner string) bool) error {
	for _, name := range names {
		parsed, ok := parseEntry(name)
		if ok && !ended(parsed.owner) || strings.HasPrefix(name, nfsRemoved) {
			continue
		}
		if err := e.pool.Discard(ctx, name); err != nil { // the pool can be used nevertheless
			klog.FromContext(ctx).Error(err, "Removing an entry of an ended process failed; it is tried again later", "pool", e.Name, "entry", name)
			continue
		}
		if strings.HasSuffix(parsed.rest, growSuffix) {
			if err := e.recordGrowth(ctx, parsed.volume); err != nil {
				return err
			}
		}
	}
	return nil
}

// nfsRemoved is the prefix of files that a Linux client has removed while they were open.
const nfsRemoved = ".nfs"

// Disown removes this process from the owners.
func (e *Export) Disown() {
	o := &e.owner
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file == nil {
		return
	}
	_ = o.file.Close() // before Remove: NFS does not remove an open file
	_ = e.Root.Remove(OwnersDir + "/" + o.token)
	o.file = nil
}

// ReservedElsewhere returns the reservations of other processes for volumes and sets that they make
// or grow, by folder.
func (e *Export) ReservedElsewhere() (map[string]ledger.Reservation, error) {
	names, err := beneath.Names(e.Tmp, ".")
	if err != nil {
		return nil, err
	}
	e.owner.mu.Lock()
	own := e.owner.token
	e.owner.mu.Unlock()
	all := map[string]ledger.Reservation{}
	for _, name := range names {
		if parsed, ok := parseEntry(name); ok && parsed.owner != own && parsed.bytes() > 0 {
			all[tmpDir+"/"+name] = ledger.Reservation{Backend: ledger.UnknownBackend, Bytes: parsed.bytes()}
		}
	}
	return all, nil
}

// AnnounceGrowth shows other processes the bytes that are reserved for a volume beyond its recorded
// capacity, until CompleteGrowth, WithdrawGrowth, or a sweep after the end of this process.
func (e *Export) AnnounceGrowth(name string, more int64) error {
	entry, err := e.Entry(name, more, growSuffix)
	if err != nil {
		return err
	}
	e.owner.mu.Lock()
	e.owner.growing[name] = entry
	e.owner.mu.Unlock()
	f, err := e.Files.Open(e.Tmp, entry, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// CompleteGrowth ends the announcement of a volume's growth: the record of the volume has its new capacity.
func (e *Export) CompleteGrowth(ctx context.Context, name string) error {
	if e.owner.growthOf(name) == "" {
		return nil
	}
	if err := e.recordGrowth(context.WithoutCancel(ctx), name); err != nil {
		return err
	}
	return e.WithdrawGrowth(name)
}

// WithdrawGrowth removes the entry of AnnounceGrowth.
func (e *Export) WithdrawGrowth(name string) error {
	entry := e.owner.growthOf(name)
	if entry == "" {
		return nil
	}
	if err := e.Root.Remove(tmpDir + "/" + entry); err != nil && !beneath.IsGone(err) {
		return err
	}
	e.owner.mu.Lock()
	defer e.owner.mu.Unlock()
	delete(e.owner.growing, name)
	return nil
}

// growthOf returns the entry of tmp that announces the growth of a volume; empty if there is none.
func (o *owner) growthOf(name string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.growing[name]
}
