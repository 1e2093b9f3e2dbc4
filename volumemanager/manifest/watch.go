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
	// quietPeriod is the time without another event after which the directory is read.
	quietPeriod = 100 * time.Millisecond
	// maxWait is the maximum time from the first event to the read. An object that disappears from the
	// files still applies for this time.
	maxWait = time.Second
	// pollPeriod is the interval at which a directory that cannot be watched is read.
	pollPeriod = 5 * time.Second
)

// Watch reads the manifests of a directory, and reads them again after each change and after each
// resync period, which must be positive. It sends the first Objects at once, and later ones only if
// they differ. A slow receiver gets only the latest Objects. The channel is closed after ctx ends.
//
// Manifests are files *.yaml, *.yml and *.json that are not hidden, and symbolic links to files inside
// the directory, as in a mounted ConfigMap. If two files declare the same object, the file that
// declared it first takes precedence, or the first by name. For an invalid file or object, and a
// missing directory, the last valid version applies. While the directory is missing or cannot be watched
// (inotify(7), /proc interfaces), it is read every pollPeriod, and Problems says so.
func Watch(ctx context.Context, dir string, resync time.Duration) (<-chan *Objects, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	w := &watcher{reader: reader{dir: dir}, latest: make(chan *Objects, 1)}
	go w.run(ctx, resync)
	return w.latest, nil
}

// watcher reads the directory again after events of inotify(7).
type watcher struct {
	reader
	// notify, events and failed are nil while the limit of inotify instances is reached.
	notify *fsnotify.Watcher
	events <-chan fsnotify.Event
	failed <-chan error
	// latest is the channel that Watch returns. It holds at most the latest Objects.
	latest chan *Objects
}

// run reads the directory and sends Objects until ctx ends.
func (w *watcher) run(ctx context.Context, resync time.Duration) {
	defer close(w.latest)
	defer func() {
		if w.notify != nil {
			_ = w.notify.Close()
		}
	}()
	tick := time.NewTicker(resync)
	defer tick.Stop()
	for ctx.Err() == nil {
		notWatched := w.addWatches()
		if objects := w.read(notWatched); objects != nil {
			w.publish(objects)
		}
		var soon <-chan time.Time
		switch {
		case w.unsettled():
			soon = time.After(maxWait)
		case notWatched != nil:
			soon = time.After(pollPeriod)
		}
		w.wait(ctx, tick.C, soon)
	}
}

// addWatches watches the directory and its parent. Events of the parent show that another directory
// is now at the path. The next read sees changes that happen before addWatches returns. A missing
// directory is an error, because its parent may be missing, too, and then no event shows its creation.
func (w *watcher) addWatches() (err error) {
	if w.notify == nil {
		notify, err := fsnotify.NewWatcher()
		if err != nil {
			return fmt.Errorf("watching %s: %w: raise fs.inotify.max_user_instances", w.dir, err)
		}
		w.notify, w.events, w.failed = notify, notify.Events, notify.Errors
	}
	for _, dir := range []string{filepath.Dir(w.dir), w.dir} {
		_ = w.notify.Remove(dir)
		if err = w.notify.Add(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("watching %s: %w: raise fs.inotify.max_user_watches", dir, err)
		}
	}
	return err
}

// publish sends Objects, and drops earlier ones that were not received.
func (w *watcher) publish(objects *Objects) {
	select {
	case <-w.latest:
	default:
	}
	w.latest <- objects
}

// wait returns when ctx has ended or the directory must be read again: when tick or soon fires, or after
// an event. After an event it waits until no event arrives for quietPeriod, at most for maxWait.
func (w *watcher) wait(ctx context.Context, tick, soon <-chan time.Time) {
	var quietTimer, deadline <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick:
			return
		case <-soon:
			return
		case <-quietTimer:
			return
		case <-deadline:
			return
		case event := <-w.events:
			if !w.concerns(event) {
				continue
			}
		case err := <-w.failed:
			klog.FromContext(ctx).V(1).Info("A change of the manifests may have been missed; reading them again", "err", err)
		}
		if deadline == nil {
			tick, soon, deadline = nil, nil, time.After(maxWait)
		}
		quietTimer = time.After(quietPeriod)
	}
}

// concerns reports whether an event is one of the directory or of a file in it.
func (w *watcher) concerns(event fsnotify.Event) bool {
	name := filepath.Clean(event.Name)
	return name == w.dir || filepath.Dir(name) == w.dir
}
