// Command registrar registers a CSI driver with the kubelet. It replaces
// node-driver-registrar, which is not available as a Go module, in the clusters of
// tests, and has the same flags.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kubernetes-csi/csi-lib-utils/connection"
	"github.com/kubernetes-csi/csi-lib-utils/rpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const probeMode = "kubelet-registration-probe"

type options struct {
	csiAddress, kubeletPath, registryDir, httpAddress string
	timeout                                           time.Duration
}

func main() {
	klog.InitFlags(nil)
	var o options
	flag.StringVar(&o.csiAddress, "csi-address", "/run/csi/socket", "`path` of the driver's socket in this container")
	flag.StringVar(&o.kubeletPath, "kubelet-registration-path", "", "`path` of the driver's socket on the node (required)")
	flag.StringVar(&o.registryDir, "plugin-registration-path", "/registration", "`directory` in which the kubelet looks for sockets")
	flag.StringVar(&o.httpAddress, "http-endpoint", "", "`address` that serves /healthz; none if empty")
	flag.DurationVar(&o.timeout, "timeout", time.Second, "timeout of a call")
	port := flag.Int("health-port", 0, "`port` that serves /healthz, instead of --http-endpoint; none if 0")
	mode := flag.String("mode", "", "with "+probeMode+", do nothing and succeed")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := func() error {
		switch {
		case o.kubeletPath == "":
			return errors.New("--kubelet-registration-path is missing")
		case *port != 0 && o.httpAddress != "":
			return errors.New("--health-port and --http-endpoint cannot both be set")
		case *mode == probeMode:
			return nil
		case *port != 0:
			o.httpAddress = fmt.Sprintf(":%d", *port)
		}
		return run(ctx, o)
	}()
	if err != nil {
		klog.ErrorS(err, "Registering the driver failed")
		klog.FlushAndExit(klog.ExitFlushTimeout, 1)
	}
}

// run registers the driver and keeps it registered until ctx ends.
func run(ctx context.Context, o options) error {
	name, err := driverName(ctx, o)
	if err != nil {
		return err
	}
	socket := filepath.Join(o.registryDir, name+"-reg.sock")
	// A previous registrar that was killed has left its socket.
	if err = os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	old := syscall.Umask(0o077)
	listener, err := net.Listen("unix", socket)
	syscall.Umask(old)
	if err != nil {
		return err
	}

	failed := make(chan error, 3) // errors of the kubelet and of the two servers
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, &registrar{name: name, endpoint: o.kubeletPath, failed: failed})
	go func() { failed <- server.Serve(listener) }()
	defer server.Stop() // it also removes the socket
	if o.httpAddress != "" {
		mux := http.NewServeMux()
		mux.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
			if err := answers(r.Context(), socket, o.timeout); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			fmt.Fprint(w, "ok")
		})
		go func() { failed <- http.ListenAndServe(o.httpAddress, mux) }()
	}
	klog.InfoS("Waiting for the kubelet", "driver", name, "socket", socket)
	select {
	case <-ctx.Done():
		return nil
	case err = <-failed:
		return err
	}
}

// driverName calls GetPluginInfo of the driver until it answers.
func driverName(ctx context.Context, o options) (string, error) {
	conn, err := connection.ConnectWithoutMetrics(ctx, o.csiAddress)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	for {
		call, cancel := context.WithTimeout(ctx, o.timeout)
		name, err := rpc.GetDriverName(call, conn)
		cancel()
		if err == nil {
			return name, nil
		}
		klog.ErrorS(err, "The driver does not answer yet", "address", o.csiAddress)
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// answers calls GetInfo on the registration socket, as the kubelet does.
func answers(ctx context.Context, socket string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = registration.NewRegistrationClient(conn).GetInfo(ctx, &registration.InfoRequest{})
	return err
}

// registrar answers the kubelet's calls on the registration socket.
type registrar struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string       // of the driver
	failed         chan<- error // receives an error if the kubelet refuses the driver
}

// GetInfo implements registration.RegistrationServer.
func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type:              registration.CSIPlugin,
		Name:              r.name,
		Endpoint:          r.endpoint,
		SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus implements registration.RegistrationServer.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if status.PluginRegistered {
		klog.InfoS("Registered", "driver", r.name)
		return &registration.RegistrationStatusResponse{}, nil
	}
	// The kubelet retries only after the socket is created again. So the registrar ends.
	select {
	case r.failed <- fmt.Errorf("the kubelet refused %s: %s", r.name, status.Error):
	default:
	}
	return &registration.RegistrationStatusResponse{}, nil
}
