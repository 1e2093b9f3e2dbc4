package flexvolume

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/mountflags"
	"github.com/trivet-csi/trivet/volume"
)

// kubeletPrefix is the prefix of the options that the kubelet adds to those of the volume.
const kubeletPrefix = "kubernetes.io/"

// Options of the kubelet: the name of the PersistentVolume or of the volume in the pod, the
// fsType, `ro` or `rw`, and the pod's namespace. Only a call to mount has the namespace.
const (
	optionName      = kubeletPrefix + "pvOrVolumeName"
	optionFSType    = kubeletPrefix + "fsType"
	optionReadWrite = kubeletPrefix + "readwrite"
	optionNamespace = kubeletPrefix + "pod.namespace"
)

// Options of the volume. All other options are parameters of CreateVolume.
const (
	optionVolume       = "volume"
	optionSize         = "size"
	optionMountOptions = "mountOptions"
)

// options holds the validated options of a call.
type options struct {
	kind string
	// pool and name identify a volume of this node. If the volume does not exist, it is created with
	// size bytes, or not at all if size is 0.
	pool, name string
	size       int64
	namespace  string
	// share is the volume context of an NFS directory; nil for a volume of this node.
	share      map[string]string
	parameters map[string]string
	fsType     string
	flags      []string
	readOnly   bool
}

// options parses the options of a call.
func (e *Executable) options(ctx context.Context, raw string) (o options, err error) {
	var in map[string]string
	if err := json.Unmarshal([]byte(raw), &in); err != nil {
		return o, volume.Errorf(volume.ErrInvalid, "options: must be a JSON object of strings: %w", err)
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
	if e.Kind != "" {
		if other, given := o.parameters[volume.ParamBackend]; given && other != e.Kind {
			return o, volume.Errorf(volume.ErrInvalid, "option %s=%q: this executable is for %s: remove the option, or install the program as trivet~trivet/trivet", volume.ParamBackend, other, e.Kind)
		}
		o.parameters[volume.ParamBackend] = e.Kind
	}
	return o, e.setKindAndPool(ctx, &o)
}

// set stores one option of the volume.
func (o *options) set(key, value string) (err error) {
	switch key {
	case optionVolume:
		o.name = value
	case optionSize:
		o.size, err = volume.ParseSize(value)
		if err != nil || o.size <= 0 {
			return volume.Errorf(volume.ErrInvalid, "option %s=%q: must be a size such as 1Gi", key, value)
		}
	case optionMountOptions:
		o.flags = mountflags.Split([]string{value})
	default:
		o.parameters[key] = value
	}
	return nil
}

// setKindAndPool sets the kind of the volume and its pool. For an NFS directory it sets the share instead
// of a pool. The driver validates all other parameters.
func (e *Executable) setKindAndPool(ctx context.Context, o *options) (err error) {
	o.kind = o.parameters[volume.ParamBackend]
	nfsOption := "" // an option that describes an NFS directory; empty if there is none
	for _, key := range []string{volume.ParamExport, volume.ParamShare, volume.ParamServer} {
		if _, given := o.parameters[key]; given {
			nfsOption = key
		}
	}
	switch {
	case o.kind != "" && o.kind == e.ServerKind, o.kind == "" && nfsOption != "":
		return o.setShare()
	case nfsOption != "":
		return volume.Errorf(volume.ErrInvalid, "option %s=%q is for backend %s, but this volume has backend %s: remove the option", nfsOption, o.parameters[nfsOption], e.ServerKind, o.kind)
	case o.name == "":
		return volume.Errorf(volume.ErrInvalid, "option %s is missing: set it to the name of the volume", optionVolume)
	case o.kind == "":
		o.kind = e.DefaultKind
	}
	if o.fsType != "" {
		o.parameters[volume.ParamFSType] = o.fsType
	}
	o.pool, err = e.choosePool(ctx, o.parameters[volume.ParamPool])
	o.parameters[volume.ParamBackend], o.parameters[volume.ParamPool] = o.kind, o.pool
	return err
}

// choosePool validates the name of a pool. For an empty name it returns the only pool. It accepts only
// the pools of the configuration, because the author of the pod sets the name, and the running driver may
// have pools that pods must not use. If the configuration has no pools, it accepts all pools of the
// running driver.
func (e *Executable) choosePool(ctx context.Context, name string) (string, error) {
	pools, owner := e.OnDemand.Pools, "the configuration of FlexVolume"
	if len(pools) == 0 {
		pools, _ = runningPools(ctx, e.Socket) // none if the driver does not answer
		owner = "the driver at " + e.Socket
	}
	if name == "" && len(pools) == 1 {
		return pools[0], nil
	}
	if !slices.Contains(pools, name) {
		return "", volume.Errorf(volume.ErrInvalid, "option %s=%q: must be one of the pools %q of %s: use one of them, or add the pool to the configuration", volume.ParamPool, name, pools, owner)
	}
	return name, nil
}

// served reports whether a driver serves a pool, or can be started to serve it.
func (e *Executable) served(ctx context.Context, pool string) bool {
	if pool == "" || slices.Contains(e.OnDemand.Pools, pool) {
		return true
	}
	running, _ := runningPools(ctx, e.Socket) // none if the driver does not answer
	return slices.Contains(running, pool)
}

// setShare sets o.share from the options that describe an NFS directory. It refuses all other options,
// because the directory is not created.
func (o *options) setShare() error {
	known := []string{volume.ParamBackend, volume.ParamServer, volume.ParamShare, volume.ParamExport, volume.ParamSubDir}
	for _, key := range slices.Sorted(maps.Keys(o.parameters)) {
		if !slices.Contains(known, key) {
			return volume.Errorf(volume.ErrInvalid, "option %s=%q: an NFS directory has only the options %s: remove it", key, o.parameters[key], strings.Join(known[1:], ", "))
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
		return volume.Errorf(volume.ErrInvalid, "option %s: an NFS directory is not created: remove the option", optionSize)
	}
	if _, err := volume.DirectPool(server, share); err != nil {
		return err
	}
	o.fsType = "" // manifests for NFS may set any filesystem type
	o.share = o.parameters
	o.share[volume.ParamShare] = share
	delete(o.share, volume.ParamExport)
	delete(o.share, volume.ParamBackend)
	return nil
}

// handle returns the identifier of an NFS directory. Volumes with the same directory and the same mount
// options have the same handle, so they are one volume. A handle is not a valid volume ID
// (volume.ParseID).
func (o *options) handle() string {
	at := path.Join(o.share[volume.ParamServer], o.share[volume.ParamShare], o.share[volume.ParamSubDir])
	return at + "?" + strings.Join(o.flags, ",")
}

// capability returns the capability of the volume. Its access mode allows any number of pods.
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
