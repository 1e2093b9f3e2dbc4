package flexvolume

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

// note writes down what a pod's own volume is mounted as: an empty directory in
// Paths.PodPlugin, called by its VolumeName. Those that a killed call leaves go with the
// pod.
func (m *mounter) note() error {
	if m.spec.PersistentVolume != nil {
		return nil
	}
	name, err := m.VolumeName(m.spec)
	if err != nil {
		return err
	}
	if err := m.unnote(m.pod.UID, m.spec.Name()); err != nil {
		return err
	}
	return os.MkdirAll(filepath.Join(m.notes(m.pod.UID), name), 0o750)
}

// checkSame refuses a pod's own volume that is mounted, and was changed since: no driver
// is told of that.
func (m *mounter) checkSame() error {
	if m.spec.PersistentVolume != nil {
		return nil
	}
	name, err := m.VolumeName(m.spec)
	if err != nil {
		return err
	}
	noted, err := m.noted(m.pod.UID, m.spec.Name())
	if err == nil && len(noted) > 0 && !slices.Contains(noted, name) {
		return plugin.Invalidf("volume %s: flexVolume: it was changed, and the pod has it as it was: set it back, or give the new one another name", m.spec.Name())
	}
	return err
}

func (d *driver) notes(pod types.UID) string { return d.host.Paths().PodPlugin(pod, d.name) }

// noted are the VolumeNames that are written down of a pod's volume: the last one, or none.
func (d *driver) noted(pod types.UID, name string) (names []string, err error) {
	entries, err := os.ReadDir(d.notes(pod))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), name+"-") && len(e.Name()) == len(name)+1+sumLength {
			names = append(names, e.Name())
		}
	}
	return names, err
}

func (d *driver) unnote(pod types.UID, name string) error {
	names, err := d.noted(pod, name)
	for _, n := range names {
		err = errors.Join(err, mount.RemoveTarget(filepath.Join(d.notes(pod), n)))
	}
	return err
}
