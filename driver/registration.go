package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registrar registers the driver with a kubelet or a volume manager, as node-driver-registrar does,
// by the plugin registration API (k8s.io/kubelet/pkg/apis/pluginregistration/v1).
type registrar struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

// GetInfo implements registration.RegistrationServer.
func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: r.name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus implements registration.RegistrationServer. The caller retries after a
// refusal.
func (r registrar) NotifyRegistrationStatus(ctx context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	log := klog.FromContext(ctx)
	if status.GetPluginRegistered() {
		log.Info("Registered", "driver", r.name)
	} else {
		log.Error(errors.New(status.GetError()), "The registration was refused", "driver", r.name)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

// listenRegistration opens the driver's socket in Options.Registry; nil if that is empty.
func (o Options) listenRegistration(ctx context.Context) (net.Listener, error) {
	if o.Registry == "" {
		return nil, nil
	}
	if err := os.MkdirAll(o.Registry, 0o750); err != nil {
		return nil, fmt.Errorf("--plugins-registry: %w", err)
	}
	l, err := listenSocket(ctx, "unix://"+filepath.Join(o.Registry, o.Name+"-reg.sock"))
	if err != nil {
		return nil, fmt.Errorf("--plugins-registry: %w", err)
	}
	return l, nil
}

// serveRegistration serves until ctx ends and then removes the socket, which unregisters the driver.
func (d *Driver) serveRegistration(ctx context.Context, l net.Listener) {
	server := grpc.NewServer()
	endpoint, _ := SocketPath(d.options.Endpoint) // valid: the driver listens on it
	registration.RegisterRegistrationServer(server, registrar{name: d.options.Name, endpoint: endpoint})
	defer context.AfterFunc(ctx, server.Stop)()
	if err := server.Serve(l); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "The registration server failed")
	}
}
