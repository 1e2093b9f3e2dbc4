package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volume"
)

// ownersDir has a file per process that makes something in a shared pool, named
// like the process's token and locked while it lives.
const ownersDir = ".trivet/owners"

// owner is this process among those that write to a shared pool. What it makes in
// tmp carries its token, so that others know when nobody makes it any more.
type owner struct {
	mu    sync.Mutex
	token string
	file  *os.File
	// growing has, by volume, the entry of tmp that shows its growth to others.
	growing map[string]string
}

// entry is what a name in tmp says: `<volume>.<owner>.<what>`. what is a number of
// bytes for a volume that is being made, and begins with one for one that grows, and
// for snapshots.
type entry struct{ volume, owner, what string }

const (
	attachSuffix = ".attach"
	growSuffix   = ".grow"
)

func parseEntry(s string) (e entry, ok bool) {
	parts := strings.SplitN(s, ".", 3)
	if len(parts) != 3 {
		return entry{}, false
	}
	return entry{parts[0], parts[1], parts[2]}, true
}

// bytes are what the entry reserves.
func (e entry) bytes() int64 {
	n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSuffix(e.what, growSuffix), snapshotSuffix), 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// tmpName names what is being made of a volume. A node-local pool has one writer,
// and needs no more than the volume's name.
func (p *Pool) tmpName(name, what string) (string, error) {
	if !p.Shared() {
		return name, nil
	}
	token, err := p.ownToken()
	return name + "." + token + "." + what, err
}

// ownToken makes this process an owner when it first writes.
func (p *Pool) ownToken() (string, error) {
	o := &p.owner
	o.mu.Lock()
	defer o.mu.Unlock()
	var err error
	// A sweep of another process may take a file that is not locked yet.
	for try := 0; o.file == nil && try < 3; try++ {
		o.token = NewUUID()
		o.file, err = p.lockOwner(o.token, os.O_CREATE|os.O_EXCL)
	}
	if err != nil {
		return "", fmt.Errorf("pool %q: becoming one of its writers: %w", p.cfg.Name, err)
	}
	return o.token, nil
}

// lockOwner takes the lock of an owner's file (EWOULDBLOCK: it lives). A server
// without locks lets everybody own, and nobody sweep.
func (p *Pool) lockOwner(token string, flag int) (*os.File, error) {
	path := ownersDir + "/" + token
	mode := uint64(0) // openat2(2) wants none where nothing is made
	if flag&os.O_CREATE != 0 {
		mode = 0o600
	}
	f, err := p.openRegular(p.dir, path, os.O_RDWR|flag, mode)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if flag&os.O_CREATE != 0 && noLocks(err) {
		err = nil
	}
	if err == nil {
		_, err = p.root.Lstat(path) // it may have been swept before it was locked
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// noLocks tells whether an error of flock(2) says that there are none (NFSv3
// without its lock service).
func noLocks(err error) bool {
	return errors.Is(err, unix.ENOLCK) || errors.Is(err, unix.EOPNOTSUPP)
}

// sweep moves to the trash what processes that ended were making. tmp is read
// first: an owner's file is there before its entries are.
func (p *Pool) sweep(ctx context.Context) error {
	own, err := p.ownToken()
	if err != nil {
		return err
	}
	names, err := namesIn(p.tmp, ".")
	if err != nil {
		return err
	}
	owners, err := namesIn(p.dir, ownersDir)
	if err != nil {
		return err
	}
	if !slices.Contains(owners, own) { // another took this process for one that ended
		p.disown()
	}
	for _, token := range owners {
		if token != own {
			err = errors.Join(err, p.sweepOwner(ctx, token, names))
		}
	}
	return errors.Join(err, p.sweepEntries(ctx, names, func(owner string) bool {
		return owner != own && !slices.Contains(owners, owner)
	}))
}

// sweepOwner clears what one owner left, if it has ended.
func (p *Pool) sweepOwner(ctx context.Context, token string, names []string) error {
	f, err := p.lockOwner(token, 0)
	if errors.Is(err, unix.EWOULDBLOCK) || noLocks(err) || isGone(err) {
		return nil
	}
	switch {
	case err == nil:
		defer f.Close()
	case !errors.Is(err, errIrregular): // what is no file is no owner's
		return fmt.Errorf("pool %q: %w", p.cfg.Name, err)
	}
	if err := p.sweepEntries(ctx, names, func(owner string) bool { return owner == token }); err != nil {
		return err
	}
	if err := p.root.Remove(ownersDir + "/" + token); err != nil && !isGone(err) {
		klog.FromContext(ctx).Error(err, "Clearing what an owner left failed; it is tried again later", "pool", p.cfg.Name)
	}
	return nil
}

func (p *Pool) sweepEntries(ctx context.Context, names []string, of func(owner string) bool) error {
	for _, name := range names {
		e, ok := parseEntry(name)
		if ok && !of(e.owner) || strings.HasPrefix(name, nfsRemoved) {
			continue
		}
		if err := p.sweepEntry(ctx, name); err != nil { // which keeps nobody from using the pool
			klog.FromContext(ctx).Error(err, "Clearing a leftover failed; it is tried again later", "pool", p.cfg.Name, "entry", name)
			continue
		}
		if strings.HasSuffix(e.what, growSuffix) {
			if err := p.noteGrowth(ctx, e.volume); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *Pool) sweepEntry(ctx context.Context, name string) error {
	if err := p.exclusively(context.WithoutCancel(ctx), func(*round) error { return p.takeBack(name, "") }); err != nil {
		return err
	}
	return p.discard(name)
}

// nfsRemoved begins the names of files that were removed while they were open, in
// the folders of a Linux client.
const nfsRemoved = ".nfs"

// discard moves an entry of tmp to the trash: a rename, so that an owner that was
// given up too early commits all or nothing of it.
func (p *Pool) discard(name string) error {
	to := name + "." + NewUUID()[:8]
	err := renameat(p.tmp, name, p.trash, to)
	if err != nil && !isGone(err) {
		return err
	}
	stake := p.trashedStake(to)
	p.ledger.mu.Lock()
	p.ledger.remove(tmpDir + "/" + name)
	if stake.disk != "" { // its mark is known by it
		p.ledger.set(trashDir+"/"+to, stake)
	}
	p.ledger.mu.Unlock()
	p.reapLater(to)
	return nil
}

// reapLater tells the reaper of an entry of the trash that promises nothing.
func (p *Pool) reapLater(name string) {
	if p.Shared() {
		notify(p.reaper.wake)
	} else if p.stop != nil { // else it begins with all that is there
		p.reaper.add(trashEntry{name: name})
	}
}

// isGone is isNotExist, and true for what another client removed while it was
// open here.
func isGone(err error) bool { return isNotExist(err) || errors.Is(err, unix.ESTALE) }

// renameat moves a name from one open directory into another.
func renameat(from *os.File, name string, to *os.File, newName string) error {
	err := unix.Renameat(int(from.Fd()), name, int(to.Fd()), newName)
	if err == nil {
		return nil
	}
	return &os.LinkError{Op: "rename", Old: from.Name() + "/" + name, New: to.Name() + "/" + newName, Err: err}
}

// moveUnique is renameat to a name that nobody else gives: it is done if that is
// there, whatever the reply was. Of a shared pool one may be lost, and the call then
// repeated in vain.
func moveUnique(from *os.File, name string, to *os.File, newName string) error {
	err := renameat(from, name, to, newName)
	if err == nil {
		return nil
	}
	if _, there := statBeneath(to, newName); there == nil {
		return nil
	}
	return err
}

// ErrExists is of a Create that found the volume made by another process: it is to
// be looked up, and compared.
var ErrExists = fmt.Errorf("%w: it exists", volume.ErrPending)

// disown ends this process's ownership.
func (p *Pool) disown() {
	o := &p.owner
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file == nil {
		return
	}
	_ = o.file.Close() // first: NFS cannot remove what is open
	_ = p.root.Remove(ownersDir + "/" + o.token)
	o.file = nil
}
