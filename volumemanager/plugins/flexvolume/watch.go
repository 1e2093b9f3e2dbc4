package flexvolume

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Run makes the call init of all installed drivers, in which they can clean up after calls that were killed with an earlier manager. Then it
// calls changed when drivers are installed or replaced, until ctx ends. As a kubelet does, it
// creates a missing directory of drivers. If the directory cannot be watched, Run only logs
// the error, and a new driver is found when its volumes are retried.
func (p *Plugin) Run(ctx context.Context) error {
	p.probeInstalled(ctx)
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

// probeInstalled begins to make the call init of all installed drivers.
func (p *Plugin) probeInstalled(ctx context.Context) {
	dirs, _ := filepath.Glob(filepath.Join(p.dir, "*")) // the pattern is valid
	for _, dir := range dirs {
		d := &driver{p.drivers, plugins.Unescape(filepath.Base(dir))}
		if info, err := os.Stat(d.executable()); err == nil && checkDriver(d.name) == nil {
			d.probe(context.WithoutCancel(ctx), info)
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
