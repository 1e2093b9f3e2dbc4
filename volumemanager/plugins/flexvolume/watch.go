package flexvolume

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// Run tells when drivers come, or others in their place, until ctx ends. The directory of
// drivers is made if it is not there, as a kubelet makes it. Where it cannot be watched
// drivers are found when their volumes are tried again.
func (p *Plugin) Run(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		defer func() { _ = watcher.Close() }()
		err = errors.Join(os.MkdirAll(p.dir, 0o755), p.watch(watcher))
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "The directory of FlexVolume drivers cannot be watched", "directory", p.dir)
		<-ctx.Done()
		return nil
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-watcher.Events:
			if p.concerns(e.Name) {
				_ = p.watch(watcher) // one that is gone by now comes again, if it does
				p.changed()
			}
		case err := <-watcher.Errors: // events were lost
			klog.FromContext(ctx).Error(err, "Watching FlexVolume drivers", "directory", p.dir)
			_ = p.watch(watcher)
			p.changed()
		}
	}
}

// watch adds what is not watched yet: the directory of drivers, and each driver's.
func (p *Plugin) watch(watcher *fsnotify.Watcher) error {
	dirs, err := filepath.Glob(filepath.Join(p.dir, "*"))
	err = errors.Join(err, watcher.Add(p.dir))
	for _, dir := range dirs {
		if info, failed := os.Stat(dir); failed == nil && info.IsDir() {
			err = errors.Join(err, watcher.Add(dir))
		}
	}
	return err
}

// concerns tells whether a path is a driver's directory or its executable. Drivers may
// write what they like beside that.
func (p *Plugin) concerns(path string) bool {
	dir := filepath.Dir(path)
	_, name, vendor := strings.Cut(filepath.Base(dir), "~")
	if !vendor {
		name = filepath.Base(dir)
	}
	return dir == filepath.Clean(p.dir) || filepath.Base(path) == name
}
