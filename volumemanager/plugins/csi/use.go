package csi

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// PodVolumeName returns the VolumeName from the record of a pod's volume.
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

// checkUnused returns an error while a volume is mounted on this node or a pod has its device,
// under the name of any PersistentVolume.
func (p *Plugin) checkUnused(v *volume) error {
	paths, err := p.paths(v)
	for _, path := range paths {
		inUse, pathErr := p.mounted(path)
		if pathErr == nil && !inUse {
			inUse, pathErr = isDevice(path)
		}
		if inUse {
			return fmt.Errorf("volume %s of driver %s is still at %s: remove the pods that use it", v.handle, v.driver, path)
		}
		err = errors.Join(err, pathErr)
	}
	return err
}

// paths returns the paths at which a volume may be staged or published, under the name of any
// PersistentVolume.
func (p *Plugin) paths(v *volume) ([]string, error) {
	err := p.readRecords()
	paths := []string{p.stagedAt(p.stagedDir(v.driver, v.handle))} // its record may be torn
	p.records.Range(func(key, value any) bool {
		if r := value.(record); r.Driver != v.driver || r.Handle != v.handle {
			return true
		}
		found, findErr := p.recordPaths(key.(string))
		paths, err = append(paths, found...), errors.Join(err, findErr)
		return true
	})
	return paths, err
}

// recordPaths returns the paths at which the volume whose record is in a directory may be staged or
// published.
func (p *Plugin) recordPaths(dir string) ([]string, error) {
	switch {
	case strings.HasPrefix(dir, p.host.Paths().Pods()+"/"):
		return []string{filepath.Join(dir, podMount)}, nil
	case filepath.Base(dir) == dataDir:
		devices, err := p.publishedDevices(filepath.Base(filepath.Dir(dir)))
		return append(devices, p.stagedAt(dir)), err
	}
	return []string{p.stagedAt(dir)}, nil
}

// readRecords reads the records that were written before this process started. When all records have been
// read, later calls do nothing, because reading all records for each of hundreds of volumes would take most
// of the time.
func (p *Plugin) readRecords() error {
	p.scanning.Lock()
	defer p.scanning.Unlock()
	if p.scanned {
		return nil
	}
	staged, err := p.recordDirs()
	if err != nil {
		return err
	}
	for _, dir := range staged {
		if r, torn := readRecord(dir); torn == nil {
			p.records.LoadOrStore(dir, r)
		}
	}
	published, complete, err := p.podRecords()
	for dir, r := range published {
		p.records.LoadOrStore(dir, r)
	}
	p.scanned = complete && err == nil
	return err
}

// publishedDevices returns the target paths of a raw device.
func (p *Plugin) publishedDevices(name string) (paths []string, err error) {
	entries, err := plugins.Entries(filepath.Dir(p.publishedDevice(name, "pod")))
	for _, e := range entries {
		paths = append(paths, p.publishedDevice(name, types.UID(e.Name())))
	}
	return paths, err
}

// podRecords returns the records of pods' filesystem volumes by directory. complete is false if a
// record cannot be read.
func (p *Plugin) podRecords() (all map[string]record, complete bool, err error) {
	pods, err := subdirectories(p.host.Paths().Pods())
	all, complete = map[string]record{}, true
	for _, pod := range pods {
		volumes, volumesErr := subdirectories(p.host.Paths().PodVolumes(types.UID(pod), Name))
		err = errors.Join(err, volumesErr)
		for _, name := range volumes {
			dir := p.podDir(types.UID(pod), name)
			r, torn := p.findRecord(dir, func(r record) bool { return r.Name == name })
			if torn == nil {
				all[dir] = r
			}
			complete = complete && torn == nil
		}
	}
	return all, complete, err
}
