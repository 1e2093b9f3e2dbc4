package manifest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

const (
	// quiet is how long nothing has to happen before the directory is read: who writes a
	// file often writes more.
	quiet = 100 * time.Millisecond
	// patience is how long it is waited for that.
	patience = time.Second
	// lookEach is how often a directory is read that cannot be watched.
	lookEach = 5 * time.Second
)

// Watch reads a directory's manifests, and again after each change and each resync (more
// than 0), until ctx ends, which closes the channel. The first Objects come at once; what comes later is
// different from the last. The channel has the latest alone: who reads slowly misses some.
//
// Files are *.yaml, *.yml and *.json that are not hidden, also symbolic links that stay
// inside the directory, as in a mounted ConfigMap. What they have counts by the order of
// their names. A file that is broken, and an object that is not valid, stays as it was;
// so does everything while there is no directory. While it cannot be watched (inotify(7),
// /proc interfaces) it is read each 5 s, and a problem of the Objects says so.
func Watch(ctx context.Context, dir string, resync time.Duration) (<-chan *Objects, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	w := &watcher{reader: reader{dir: dir}, latest: make(chan *Objects, 1)}
	go w.run(ctx, resync)
	return w.latest, nil
}

type watcher struct {
	reader
	// notify is nil, and its channels are, as long as the kernel has no inotify instance left.
	notify *fsnotify.Watcher
	events <-chan fsnotify.Event
	failed <-chan error
	latest chan *Objects
}

func (w *watcher) run(ctx context.Context, resync time.Duration) {
	defer close(w.latest)
	defer w.unfollow()
	tick := time.NewTicker(resync)
	defer tick.Stop()
	for ctx.Err() == nil {
		notWatched := w.follow()
		if objects := w.read(notWatched); objects != nil {
			w.publish(objects)
		}
		var soon <-chan time.Time
		switch {
		case w.unsettled():
			soon = time.After(patience)
		case notWatched != nil:
			soon = time.After(lookEach)
		}
		w.wait(ctx, tick.C, soon)
	}
}

// follow watches the directory that has the path now, and the one above, which tells when
// it is another. What happens in between is seen by the read that comes next.
func (w *watcher) follow() error {
	if w.notify == nil {
		notify, err := fsnotify.NewWatcher()
		if err != nil {
			return fmt.Errorf("watching %s: %w: raise fs.inotify.max_user_instances", w.dir, err)
		}
		w.notify, w.events, w.failed = notify, notify.Events, notify.Errors
	}
	for _, dir := range []string{filepath.Dir(w.dir), w.dir} {
		_ = w.notify.Remove(dir)
		if err := w.notify.Add(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("watching %s: %w: raise fs.inotify.max_user_watches", dir, err)
		}
	}
	return nil
}

func (w *watcher) unfollow() {
	if w.notify != nil {
		_ = w.notify.Close()
	}
}

// publish replaces what has not been read yet.
func (w *watcher) publish(objects *Objects) {
	select {
	case <-w.latest:
	default:
	}
	w.latest <- objects
}

// wait returns when the directory is to be read again, or ctx ended.
func (w *watcher) wait(ctx context.Context, tick, soon <-chan time.Time) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick:
			return
		case <-soon:
			return
		case event := <-w.events:
			if !w.concerns(event) {
				continue
			}
		case err := <-w.failed:
			missed(ctx, err)
		}
		w.settle(ctx)
		return
	}
}

func (w *watcher) settle(ctx context.Context) {
	over := time.After(patience)
	still := time.NewTimer(quiet)
	defer still.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-over:
			return
		case <-still.C:
			return
		case event := <-w.events:
			if w.concerns(event) {
				still.Reset(quiet)
			}
		case err := <-w.failed:
			missed(ctx, err)
		}
	}
}

func missed(ctx context.Context, err error) {
	klog.FromContext(ctx).V(1).Info("A change of the manifests may not have been seen; they are read again", "err", err)
}

// concerns leaves out what happens beside the directory.
func (w *watcher) concerns(event fsnotify.Event) bool {
	name := filepath.Clean(event.Name)
	return name == w.dir || filepath.Dir(name) == w.dir
}
