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

// Run calls changed when drivers are installed or replaced, until ctx ends. As a kubelet does, it
// creates a missing directory of drivers. If the directory cannot be watched, Run only logs
// the error, and a new driver is found when its volumes are retried.
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
			if p.isDriver(e.Name) {
				_ = p.watch(watcher) // a directory may be removed meanwhile
				p.changed()
			}
		case err := <-watcher.Errors:
			klog.FromContext(ctx).Error(err, "Events of FlexVolume drivers were lost", "directory", p.dir)
			_ = p.watch(watcher)
			p.changed()
		}
	}
}

// watch watches the directory of drivers, and the directory of each driver.
func (p *Plugin) watch(watcher *fsnotify.Watcher) error {
	dirs, err := filepath.Glob(filepath.Join(p.dir, "*"))
	err = errors.Join(err, watcher.Add(p.dir))
	for _, dir := range dirs {
		if info, statErr := os.Stat(dir); statErr == nil && info.IsDir() {
			err = errors.Join(err, watcher.Add(dir))
		}
	}
	return err
}

// isDriver reports whether a path is a driver's directory or executable. Drivers may write other files
// to the directory.
func (p *Plugin) isDriver(path string) bool {
	dir := filepath.Dir(path)
	_, name, hasVendor := strings.Cut(filepath.Base(dir), "~")
	if !hasVendor {
		name = filepath.Base(dir)
	}
	return dir == filepath.Clean(p.dir) || filepath.Base(path) == name
}
