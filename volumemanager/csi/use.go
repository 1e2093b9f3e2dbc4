package csi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/types"
)

// PodVolumeName is the driver and the handle in the record of a pod's volume.
func (p *Plugin) PodVolumeName(name string, pod types.UID, block bool) string {
	dir := p.podDir(pod, name)
	if block {
		dir = p.deviceData(name)
	}
	r, err := readRecord(dir)
	if err != nil {
		return ""
	}
	return volumeName(r.Driver, r.Handle)
}

// checkUnused is an error as long as a volume is mounted on this machine, or a pod has its
// device, as whatever PersistentVolume.
func (p *Plugin) checkUnused(v *volume) error {
	paths, err := p.paths(v)
	for _, path := range paths {
		is, failed := p.mounted(path)
		if failed == nil && !is {
			is, failed = isDevice(path)
		}
		if is {
			return fmt.Errorf("volume %s of driver %s is still at %s: remove the pods that have it", v.handle, v.driver, path)
		}
		err = errors.Join(err, failed)
	}
	return err
}

// paths are those at which a volume may be staged or published, as the disk has it.
func (p *Plugin) paths(v *volume) ([]string, error) {
	staged, err := p.recordDirs()
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, dir := range staged {
		r, torn := readRecord(dir)
		if dir != p.stagedDir(v.driver, v.handle) && (torn != nil || !r.of(v)) {
			continue
		}
		paths = append(paths, p.stagedAt(dir))
		if filepath.Base(dir) == dataDir {
			devices, err := p.publishedDevices(filepath.Base(filepath.Dir(dir)))
			if err != nil {
				return nil, err
			}
			paths = append(paths, devices...)
		}
	}
	published, err := p.podRecords()
	for dir, r := range published {
		if r.of(v) {
			paths = append(paths, filepath.Join(dir, podMount))
		}
	}
	return paths, err
}

func (r record) of(v *volume) bool { return r.Driver == v.driver && r.Handle == v.handle }

// publishedDevices are the target paths of a raw device.
func (p *Plugin) publishedDevices(name string) (paths []string, err error) {
	entries, err := os.ReadDir(filepath.Dir(p.publishedDevice(name, "pod")))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		paths = append(paths, p.publishedDevice(name, types.UID(e.Name())))
	}
	return paths, err
}

// podRecords are those of the filesystems that pods have, by their directories.
func (p *Plugin) podRecords() (map[string]record, error) {
	pods, err := names(p.host.Paths().Pods())
	all := map[string]record{}
	for _, pod := range pods {
		volumes, failed := names(p.host.Paths().PodVolumes(types.UID(pod), Name))
		err = errors.Join(err, failed)
		for _, name := range volumes {
			dir := p.podDir(types.UID(pod), name)
			if r, torn := p.find(dir, func(r record) bool { return r.Name == name }); torn == nil {
				all[dir] = r
			}
		}
	}
	return all, err
}
