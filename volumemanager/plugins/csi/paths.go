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
	boundDir   = "dev"
	dataDir    = "data"

	globalMount = "globalmount"
	podMount    = "mount"
	recordFile  = "vol_data.json"
)

// ownDir returns the plugin's directory.
func (p *Plugin) ownDir() string { return p.host.Paths().Plugin(Name) }

// stagedDir returns the directory of a filesystem's staging mount and its record.
func (p *Plugin) stagedDir(driver, handle string) string {
	return filepath.Join(p.ownDir(), driver, hash(handle))
}

// stagedDevice returns the staging path of a raw device.
func (p *Plugin) stagedDevice(name string) string {
	return filepath.Join(p.ownDir(), devicesDir, stagingDir, name)
}

// publishedDevice returns the target path of a raw device.
func (p *Plugin) publishedDevice(name string, pod types.UID) string {
	return filepath.Join(p.ownDir(), devicesDir, publishDir, name, string(pod))
}

// boundDevice returns the path at which a pod's raw device is bind-mounted for programs of the node.
func (p *Plugin) boundDevice(name string, pod types.UID) string {
	return filepath.Join(p.ownDir(), devicesDir, name, boundDir, string(pod))
}

// deviceData returns the directory of the record of a raw device.
func (p *Plugin) deviceData(name string) string {
	return filepath.Join(p.ownDir(), devicesDir, name, dataDir)
}

// podDir returns the directory of a pod's mount of a volume, and of its record.
func (p *Plugin) podDir(pod types.UID, name string) string {
	return p.host.Paths().PodVolume(pod, Name, name)
}

// stagingPaths returns the staging path of a volume, and the directory of its record.
func (p *Plugin) stagingPaths(v *volume) (staging, data string) {
	if v.block {
		return p.stagedDevice(v.name), p.deviceData(v.name)
	}
	dir := p.stagedDir(v.driver, v.handle)
	return filepath.Join(dir, globalMount), dir
}
