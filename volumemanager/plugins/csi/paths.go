package csi

import (
	"path/filepath"

	"k8s.io/apimachinery/pkg/types"
)

// The names of the kubelet's directories and files.
const (
	devicesDir = "volumeDevices"
	stagingDir = "staging"
	publishDir = "publish"
	shownDir   = "dev"
	dataDir    = "data"

	globalMount = "globalmount"
	podMount    = "mount"
	recordFile  = "vol_data.json"
)

// ownDir has what is kept for all pods.
func (p *Plugin) ownDir() string { return p.host.Paths().Plugin(Name) }

// stagedDir has a filesystem's global mount, and its record beside it.
func (p *Plugin) stagedDir(driver, handle string) string {
	return filepath.Join(p.ownDir(), driver, hash(handle))
}

// stagedDevice is the staging path of a raw device.
func (p *Plugin) stagedDevice(name string) string {
	return filepath.Join(p.ownDir(), devicesDir, stagingDir, name)
}

// publishedDevice is the target path of a raw device.
func (p *Plugin) publishedDevice(name string, pod types.UID) string {
	return filepath.Join(p.ownDir(), devicesDir, publishDir, name, string(pod))
}

// shownDevice is where a raw device of a pod is shown to programs of the machine.
func (p *Plugin) shownDevice(name string, pod types.UID) string {
	return filepath.Join(p.ownDir(), devicesDir, name, shownDir, string(pod))
}

// deviceData has the record of a raw device.
func (p *Plugin) deviceData(name string) string {
	return filepath.Join(p.ownDir(), devicesDir, name, dataDir)
}

// podDir has a volume's mount in a pod, and its record.
func (p *Plugin) podDir(pod types.UID, name string) string {
	return p.host.Paths().PodVolume(pod, Name, name)
}

// place is where a volume is staged, and where its record is.
func (p *Plugin) place(v *volume) (staging, data string) {
	if v.block {
		return p.stagedDevice(v.name), p.deviceData(v.name)
	}
	dir := p.stagedDir(v.driver, v.handle)
	return filepath.Join(dir, globalMount), dir
}
