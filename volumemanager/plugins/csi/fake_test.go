package csi_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// errFalseSuccess makes a call return success without an effect.
var errFalseSuccess = errors.New("false success")

// fake is a driver that mounts a tmpfs for each volume. A test can replace its calls.
type fake struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer

	path string
	stop func()

	mu     sync.Mutex
	name   string
	nodeID string
	ready  bool
	// replaced contains the replacements of calls, by name.
	replaced map[string]func(context.Context, any) error
	// requests contains the last request of each call, and calls the names of all calls.
	requests map[string]any
	calls    []string
	// created is the volume in the response of CreateVolume.
	created *csi.Volume
	// expandedSize is the size in the response of ControllerExpandVolume.
	expandedSize int64
	// plugin, nodeCan and control are the capabilities of the driver, and of its Node and Controller
	// services.
	plugin  []csi.PluginCapability_Service_Type
	nodeCan []csi.NodeServiceCapability_RPC_Type
	control []csi.ControllerServiceCapability_RPC_Type
}

// newFake serves a driver with all capabilities that the plugin uses.
func newFake(t *testing.T, h *host) *fake {
	t.Helper()
	f := &fake{
		path: filepath.Join(filepath.Dir(h.Root), "csi.sock"), name: driverName, nodeID: "fake-node", ready: true,
		replaced: map[string]func(context.Context, any) error{}, requests: map[string]any{},
		plugin: []csi.PluginCapability_Service_Type{csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS},
		nodeCan: []csi.NodeServiceCapability_RPC_Type{
			csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
			csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		},
		control: []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
			csi.ControllerServiceCapability_RPC_EXPAND_VOLUME, csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT, csi.ControllerServiceCapability_RPC_PUBLISH_READONLY,
		},
	}
	f.start(t)
	return f
}

// registeredFake returns a host with a registered fake.
func registeredFake(t *testing.T) (*host, *fake) {
	t.Helper()
	h := newHost(t)
	f := newFake(t, h)
	h.startRegistrar(t, "fake-reg.sock", info(driverName, f.path, "1.0.0"))
	h.waitForStatus(t, "fake-reg.sock", registered)
	return h, f
}

// start serves the driver until stop is called or the test ends.
func (f *fake) start(t *testing.T) {
	t.Helper()
	f.stop = serve(t, f.path, func(s *grpc.Server) {
		csi.RegisterIdentityServer(s, f)
		csi.RegisterControllerServer(s, f)
		csi.RegisterNodeServer(s, f)
	})
}

// replace replaces the effect of a call with do, which gets the request; nil restores the call.
func (f *fake) replace(call string, do func(context.Context, any) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.replaced[call] = do
}

// failWith makes a call return an error.
func (f *fake) failWith(call string, err error) {
	f.replace(call, func(context.Context, any) error { return err })
}

// change changes the fields of the driver.
func (f *fake) change(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// lastRequest returns the last request of a call; nil if there was none.
func lastRequest[R any](f *fake) *R {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, _ := f.requests[fmt.Sprintf("%T", new(R))].(*R)
	return r
}

// count returns the number of calls with a name.
func (f *fake) count(call string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.calls {
		if c == call {
			n++
		}
	}
	return n
}

// record records a call, and runs its replacement. done is true if there is a replacement; err is its error.
func (f *fake) record(ctx context.Context, request any) (done bool, err error) {
	name := strings.TrimSuffix(strings.TrimPrefix(fmt.Sprintf("%T", request), "*csi."), "Request")
	f.mu.Lock()
	f.calls = append(f.calls, name)
	f.requests[fmt.Sprintf("%T", request)] = request
	do := f.replaced[name]
	f.mu.Unlock()
	if do == nil {
		return false, nil
	}
	err = do(ctx, request)
	if errors.Is(err, errFalseSuccess) {
		err = nil
	}
	return true, err
}

func (f *fake) GetPluginInfo(ctx context.Context, r *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	_, err := f.record(ctx, r)
	f.mu.Lock()
	defer f.mu.Unlock()
	return &csi.GetPluginInfoResponse{Name: f.name}, err
}

func (f *fake) Probe(ctx context.Context, r *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	_, err := f.record(ctx, r)
	f.mu.Lock()
	defer f.mu.Unlock()
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(f.ready)}, err
}

func (f *fake) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &csi.GetPluginCapabilitiesResponse{}
	for _, c := range f.plugin {
		resp.Capabilities = append(resp.Capabilities, &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: c}}})
	}
	return resp, nil
}

func (f *fake) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, c := range f.nodeCan {
		resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: c}}})
	}
	return resp, nil
}

func (f *fake) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, c := range f.control {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: c}}})
	}
	return resp, nil
}

func (f *fake) NodeGetInfo(ctx context.Context, r *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	_, err := f.record(ctx, r)
	f.mu.Lock()
	defer f.mu.Unlock()
	return &csi.NodeGetInfoResponse{NodeId: f.nodeID, MaxVolumesPerNode: 7, AccessibleTopology: &csi.Topology{Segments: map[string]string{"zone": "here"}}}, err
}

func (f *fake) NodeStageVolume(ctx context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	done, err := f.record(ctx, r)
	if !done && r.GetVolumeCapability().GetBlock() == nil {
		err = mountTmpfs(r.GetStagingTargetPath())
	}
	return &csi.NodeStageVolumeResponse{}, err
}

func (f *fake) NodeUnstageVolume(ctx context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	done, err := f.record(ctx, r)
	if !done {
		_ = syscall.Unmount(r.GetStagingTargetPath(), 0) // returns EINVAL if it is not mounted
	}
	return &csi.NodeUnstageVolumeResponse{}, err
}

func (f *fake) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	done, err := f.record(ctx, r)
	switch {
	case done:
	case r.GetVolumeCapability().GetBlock() != nil:
		const loop0 = 7 << 8 // major number 7, minor number 0
		if err = syscall.Mknod(r.GetTargetPath(), syscall.S_IFBLK|0o600, loop0); errors.Is(err, os.ErrExist) {
			err = nil
		}
	default:
		err = mountTmpfs(r.GetTargetPath())
	}
	return &csi.NodePublishVolumeResponse{}, err
}

func (f *fake) NodeUnpublishVolume(ctx context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	done, err := f.record(ctx, r)
	if !done {
		_ = syscall.Unmount(r.GetTargetPath(), 0) // returns EINVAL if it is not mounted
		_ = os.Remove(r.GetTargetPath())
	}
	return &csi.NodeUnpublishVolumeResponse{}, err
}

func (f *fake) NodeExpandVolume(ctx context.Context, r *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	_, err := f.record(ctx, r)
	return &csi.NodeExpandVolumeResponse{}, err
}

func (f *fake) CreateVolume(ctx context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	_, err := f.record(ctx, r)
	f.mu.Lock()
	defer f.mu.Unlock()
	return &csi.CreateVolumeResponse{Volume: f.created}, err
}

func (f *fake) DeleteVolume(ctx context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	_, err := f.record(ctx, r)
	return &csi.DeleteVolumeResponse{}, err
}

func (f *fake) ControllerPublishVolume(ctx context.Context, r *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	_, err := f.record(ctx, r)
	return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{"device": "sda"}}, err
}

func (f *fake) ControllerUnpublishVolume(ctx context.Context, r *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	_, err := f.record(ctx, r)
	return &csi.ControllerUnpublishVolumeResponse{}, err
}

func (f *fake) ControllerExpandVolume(ctx context.Context, r *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	_, err := f.record(ctx, r)
	f.mu.Lock()
	defer f.mu.Unlock()
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: f.expandedSize, NodeExpansionRequired: true}, err
}

// mountTmpfs mounts a tmpfs unless a filesystem is mounted at the path.
func mountTmpfs(at string) error {
	if err := os.Mkdir(at, 0o750); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	var st, parent syscall.Stat_t
	if err := errors.Join(syscall.Stat(at, &st), syscall.Stat(filepath.Dir(at), &parent)); err != nil || st.Dev != parent.Dev {
		return err
	}
	return syscall.Mount("fake", at, "tmpfs", 0, "size=1m")
}
