package export

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
)

const (
	// inheritTime limits how long the next worker waits for the end of a killed worker and the unmount
	// of that worker's mount. inheritPoll is the time between two attempts to unmount.
	inheritTime = 30 * time.Second
	inheritPoll = 200 * time.Millisecond
	// leavePatience is how long an ending worker waits for its pool to close before it aborts the NFS
	// calls of its mounts, and how long it waits after that. The driver kills the worker after
	// intervals.stopTimeout.
	leavePatience = 1600 * time.Millisecond
)

// bases are the base mounts of the workers of one pool. The path of each contains the ID of its worker's
// process. A killed process with an open file of a silent server ends only after the close of that file,
// which waits for the server. The next worker aborts that wait through the path.
type bases struct {
	dir, prefix string
	silent      bool         // the server did not answer when this process was started
	made        atomic.Int64 // number of mounts that this process has made
}

// newBases returns the base mounts of a pool. silent is true if the server does not answer now.
func newBases(stateDir, poolName string, silent bool) (*bases, error) {
	dir, err := filepath.EvalSymlinks(stateDir)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(poolName))
	return &bases{dir: filepath.Join(dir, "exports"), prefix: hex.EncodeToString(sum[:8]) + ".", silent: silent}, nil
}

// mount mounts the export like Mount, but at a new path of this process.
func (b *bases) mount(ctx context.Context, c pool.Config) (root *os.File, version string, err error) {
	b.clear(ctx)
	fs, version, err := mountExport(ctx, c)
	if err != nil {
		return nil, "", err
	}
	defer func() { err = errors.Join(err, fs.Close()) }()
	at := filepath.Join(b.dir, fmt.Sprintf("%s%v.%d", b.prefix, self(), b.made.Add(1)))
	if err := os.MkdirAll(at, 0o700); err != nil {
		return nil, "", err
	}
	if root, err = fs.OpenRoot(); err != nil {
		return nil, "", errors.Join(err, mount.RemoveTarget(at))
	}
	if err := fs.MoveTo(at); err != nil {
		root.Close()
		return nil, "", errors.Join(err, mount.RemoveTarget(at))
	}
	return root, version, nil
}

// all returns the existing base mounts by path, with the process that created each.
func (b *bases) all() map[string]processID {
	found := map[string]processID{}
	paths, err := filepath.Glob(filepath.Join(b.dir, b.prefix+"*"))
	if err != nil {
		return nil
	}
	for _, path := range paths {
		name, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), b.prefix), ".")
		if maker, err := parseProcessID(name); err == nil {
			found[path] = maker
		}
	}
	return found
}

// clear removes the base mounts of this process that are not in use, and starts to remove those of other
// processes.
func (b *bases) clear(ctx context.Context) {
	for path, maker := range b.all() {
		if maker == self() {
			_ = removeMount(path) // a mount in use is removed by a later call
			continue
		}
		go b.inherit(ctx, path, maker)
	}
}

// inherit unmounts the base mount of a worker that was killed.
func (b *bases) inherit(ctx context.Context, path string, maker processID) {
	ctx, cancel := context.WithTimeout(ctx, inheritTime)
	defer cancel()
	if b.silent {
		// Acknowledged writes of a worker are durable, so aborting its calls loses no data.
		if err := mount.AbortNFS(ctx, path, maker.ended); err != nil {
			klog.FromContext(ctx).Error(err, "A killed worker still waits for its server", "pid", maker.pid)
			return
		}
		if err := mount.ForceUnmountNFS(ctx, path); err != nil {
			klog.FromContext(ctx).Error(err, "Unmounting the base mount of a killed worker failed", "path", path)
			return
		}
	}
	for removeMount(path) != nil && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(inheritPoll):
		}
	}
}

// removeMount unmounts the mount at a path, if one exists, and removes the directory.
func removeMount(path string) error {
	e, err := mount.OnPath(path)
	if err == nil && e != nil {
		err = mount.Unmount(path)
	}
	if err != nil {
		return err
	}
	return mount.RemoveTarget(path)
}

// leave waits until the pool is closed, and then removes the mounts of this process. The channel closed is closed
// when the pool is closed. If that takes longer than leavePatience, the server is silent, and leave aborts the NFS
// calls that wait for the server, because otherwise the process could not end.
func (b *bases) leave(closed <-chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*leavePatience)
	defer cancel()
	select {
	case <-closed:
	case <-time.After(leavePatience):
		for _, path := range b.own() {
			_ = mount.AbortNFS(ctx, path, func() bool { return isClosed(closed) })
		}
	}
	if !isClosed(closed) {
		return // the next worker aborts the calls of this worker through the mounts of this worker
	}
	for _, path := range b.own() {
		// A pool of an earlier mount may still be open; the end of the process closes it.
		if mount.DetachNFS(path) == nil {
			_ = mount.RemoveTarget(path)
		}
	}
}

// own returns the base mounts of this process.
func (b *bases) own() (paths []string) {
	for path, maker := range b.all() {
		if maker == self() {
			paths = append(paths, path)
		}
	}
	return paths
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
