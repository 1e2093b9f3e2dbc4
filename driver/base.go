package driver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/pool"
)

// A worker's base mount stands at a path, with the worker's process in it. A process
// that is killed while it has a file of a silent server open does not end before that
// file is closed, which waits for the server; only through a path can the next worker
// make that wait fail.

const (
	// leaveTime is how long a killed worker may take to end, and its mount to be let
	// go, once the server answers or its calls are made to fail.
	leaveTime = 30 * time.Second
	leavePoll = 200 * time.Millisecond
)

// bases are the base mounts of one pool's workers.
type bases struct {
	dir, prefix string
	silent      bool
	made        atomic.Int64
}

func newBases(stateDir, poolName string, silent bool) (*bases, error) {
	dir, err := filepath.EvalSymlinks(stateDir)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(poolName))
	return &bases{dir: filepath.Join(dir, "exports"), prefix: hex.EncodeToString(sum[:8]) + ".", silent: silent}, nil
}

// mount is MountExport at a path of this process.
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

// left are the base mounts that there are, by path, with the process that made each.
func (b *bases) left() map[string]process {
	found := map[string]process{}
	paths, err := filepath.Glob(filepath.Join(b.dir, b.prefix+"*"))
	if err != nil {
		return nil
	}
	for _, path := range paths {
		name, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), b.prefix), ".")
		if maker, err := parseProcess(name); err == nil {
			found[path] = maker
		}
	}
	return found
}

// clear takes away what this process does not use any more, and begins to take away
// what others left.
func (b *bases) clear(ctx context.Context) {
	for path, maker := range b.left() {
		if maker == self() {
			_ = remove(path) // one that is busy is tried again
			continue
		}
		go b.inherit(ctx, path, maker)
	}
}

// inherit takes away the base mount of a worker that was killed.
func (b *bases) inherit(ctx context.Context, path string, maker process) {
	ctx, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	if b.silent {
		// What a worker has acknowledged is durable: nothing is lost with its calls.
		if err := mount.AbortNFS(ctx, path, maker.gone); err != nil {
			klog.FromContext(ctx).Error(err, "A killed worker still waits for its server", "pid", maker.pid)
			return
		}
		if err := mount.ForceUnmountNFS(ctx, path); err != nil {
			klog.FromContext(ctx).Error(err, "Unmounting what a killed worker left failed", "path", path)
			return
		}
	}
	for remove(path) != nil && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(leavePoll):
		}
	}
}

// remove unmounts what is mounted at a path, and removes the directory.
func remove(path string) error {
	e, err := mount.OnPath(path)
	if err == nil && e != nil {
		err = mount.Unmount(path)
	}
	if err != nil {
		return err
	}
	return mount.RemoveTarget(path)
}

// leave ends the use of this process's mounts: closed is closed when the pool is. If
// that takes long its server is silent, and what waits for it is made to fail; else the
// process could not end.
func (b *bases) leave(closed <-chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*closeTime/3)
	defer cancel()
	select {
	case <-closed:
	case <-time.After(closeTime / 3):
		for path := range b.own() {
			_ = mount.AbortNFS(ctx, path, func() bool { return isClosed(closed) })
		}
	}
	if !isClosed(closed) {
		return // the mounts are left to the next worker, which frees this one by them
	}
	for path := range b.own() {
		// A pool that was mounted anew may not be closed yet: it is when the process ends.
		if mount.LetGoNFS(path) == nil {
			_ = mount.RemoveTarget(path)
		}
	}
}

// own are the base mounts of this process.
func (b *bases) own() iter.Seq[string] {
	return func(yield func(string) bool) {
		for path, maker := range b.left() {
			if maker == self() && !yield(path) {
				return
			}
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
