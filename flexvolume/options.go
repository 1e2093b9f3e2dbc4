package flexvolume

import (
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// kubeletPrefix begins the options that the kubelet adds to those of the volume.
const kubeletPrefix = "kubernetes.io/"

// Of the kubelet: the name of the PersistentVolume, or of the volume in the pod, its
// fsType, whether it may be written, `ro` or `rw`, and the pod's namespace, which only a
// call to mount has.
const (
	optionName      = kubeletPrefix + "pvOrVolumeName"
	optionFSType    = kubeletPrefix + "fsType"
	optionReadWrite = kubeletPrefix + "readwrite"
	optionNamespace = kubeletPrefix + "pod.namespace"
)

// Of the volume; what else there is are parameters of a volume that is made.
const (
	optionVolume       = "volume"
	optionSize         = "size"
	optionMountOptions = "mountOptions"
)

// options are those of a call, checked.
type options struct {
	backend string
	// pool and name are where a volume of this node lies, and size in bytes what it is
	// made with if it is not there; 0: it is not made.
	pool, name string
	size       int64
	namespace  string
	// share is of a directory on a server: its address, as a volume's context has it;
	// nil: it is a volume of this node.
	share      map[string]string
	parameters map[string]string
	fsType     string
	flags      []string
	readOnly   bool
}

// options reads those of a call.
func (e *Executable) options(raw string) (o options, err error) {
	var in map[string]string
	if err := json.Unmarshal([]byte(raw), &in); err != nil {
		return o, volume.Errorf(volume.ErrInvalid, "options: want a JSON object of strings: %w", err)
	}
	o = options{
		name: in[optionName], fsType: in[optionFSType], readOnly: in[optionReadWrite] == "ro", namespace: in[optionNamespace],
		parameters: map[string]string{},
	}
	maps.DeleteFunc(in, func(key, _ string) bool { return strings.HasPrefix(key, kubeletPrefix) })
	for key, value := range in {
		if err := o.set(key, value); err != nil {
			return o, err
		}
	}
	if e.Backend != "" {
		if other, given := o.parameters[volume.ParamBackend]; given && other != e.Backend {
			return o, volume.Errorf(volume.ErrInvalid, "option %s=%q: this executable is for backend %s: remove it, or install one in trivet~trivet", volume.ParamBackend, other, e.Backend)
		}
		o.parameters[volume.ParamBackend] = e.Backend
	}
	return o, e.place(&o)
}

func (o *options) set(key, value string) (err error) {
	switch key {
	case optionVolume:
		o.name = value
	case optionSize:
		o.size, err = volume.ParseSize(value)
		if err != nil || o.size <= 0 {
			return volume.Errorf(volume.ErrInvalid, "option %s=%q: want a size such as 1Gi", key, value)
		}
	case optionMountOptions:
		o.flags = strings.Split(value, ",")
	default:
		o.parameters[key] = value
	}
	return nil
}

// place finds out what kind of a volume the options tell of, and in which pool it is.
func (e *Executable) place(o *options) error {
	p, err := volume.ParseParameters(o.parameters)
	if err != nil {
		return err
	}
	o.backend = p.Backend
	if o.backend == volume.BackendNFS {
		return o.setShare()
	}
	if _, _, direct := volume.ParseDirectPool(p.Pool); direct {
		return volume.Errorf(volume.ErrInvalid, "option %s=%q is of backend %s, and this volume is of backend %s: remove it", volume.ParamServer, o.parameters[volume.ParamServer], volume.BackendNFS, o.backend)
	}
	if o.name == "" {
		return volume.Errorf(volume.ErrInvalid, "option %s is missing: name the volume", optionVolume)
	}
	if o.fsType != "" {
		o.parameters[volume.ParamFSType] = o.fsType
	}
	o.pool, err = e.pool(p.Pool)
	o.parameters[volume.ParamPool] = o.pool
	return err
}

// pool is the name of a pool of this node, the only one if none is named.
func (e *Executable) pool(name string) (string, error) {
	local := slices.DeleteFunc(slices.Clone(e.Pools), pool.Config.Shared)
	if name == "" && len(local) == 1 {
		return local[0].Name, nil
	}
	var names []string
	for _, c := range local {
		names = append(names, c.Name)
	}
	if !slices.Contains(names, name) {
		return "", volume.Errorf(volume.ErrInvalid, "option %s=%q: the configuration here has no such pool of this node (it has %q): name one that it has, or add it", volume.ParamPool, name, names)
	}
	return name, nil
}

// setShare takes what a directory of a server is described by, and nothing else: it is
// not made.
func (o *options) setShare() error {
	known := []string{volume.ParamBackend, volume.ParamServer, volume.ParamShare, volume.ParamExport, volume.ParamSubDir}
	for _, key := range slices.Sorted(maps.Keys(o.parameters)) {
		if !slices.Contains(known, key) {
			return volume.Errorf(volume.ErrInvalid, "option %s=%q: a directory of a server has %s: remove it", key, o.parameters[key], strings.Join(known[1:], ", "))
		}
	}
	server := o.parameters[volume.ParamServer]
	share, err := volume.Share(o.parameters)
	switch {
	case err != nil:
		return fmt.Errorf("options %w", err)
	case server == "" || share == "":
		return volume.Errorf(volume.ErrInvalid, "options %s=%q, %s=%q: give both", volume.ParamServer, server, volume.ParamShare, share)
	case o.size != 0:
		return volume.Errorf(volume.ErrInvalid, "option %s: a directory of a server is not made: remove it", optionSize)
	}
	o.fsType = "" // whatever manifests call it
	o.share = o.parameters
	o.share[volume.ParamShare] = share
	delete(o.share, volume.ParamExport)
	delete(o.share, volume.ParamBackend)
	return nil
}

// handle names a directory of a server: two volumes of one directory that are mounted
// alike are one volume. It is no volume ID (volume.ParseID).
func (o *options) handle() string {
	at := path.Join(o.share[volume.ParamServer], o.share[volume.ParamShare], o.share[volume.ParamSubDir])
	return at + "?" + strings.Join(o.flags, ",")
}

func (o *options) lock() string { return lockName(o.pool, o.handle()) }

// capability is how the volume is used: by any number of pods.
func (o *options) capability() *csi.VolumeCapability {
	mode := csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	if o.share != nil {
		mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	}
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: o.fsType, MountFlags: o.flags}},
	}
}
