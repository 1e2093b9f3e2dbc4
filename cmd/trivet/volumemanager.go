package main

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volumemanager"
)

func newVolumeManagerCommand() *cobra.Command {
	var o volumemanager.Options
	cmd := &cobra.Command{
		Use:     "volume-manager",
		GroupID: serviceGroup,
		Short:   "Mount the volumes of pods without a kubelet",
		Long: `Mounts the volumes of the pods in a directory of Kubernetes manifests, until SIGTERM or
SIGINT. It does not start containers. Volumes stay mounted when it ends.

The exit status is 1 if it cannot start or cannot continue.`,
		Example: `  # Mount the volumes of the pods in /etc/trivet/manifests.
  trivet volume-manager

  # Show the volumes, and wait for those of a pod.
  trivet volume-manager status
  trivet volume-manager wait default/web`,
	}
	rootDir := rootDirFlag(cmd)
	directoryFlag(cmd, &o.Manifests, "manifests", "/etc/trivet/manifests", "`directory` of the Kubernetes manifests")
	directoryFlag(cmd, &o.Registry, "plugins-registry", "", "`directory` where CSI drivers register; empty: plugins_registry below --root-dir")
	directoryFlag(cmd, &o.FlexVolumes, "volume-plugin-dir", "/usr/libexec/kubernetes/kubelet-plugins/volume/exec", "`directory` of FlexVolume executables")
	flags := cmd.Flags()
	flags.StringVar(&o.HTTPAddress, "http-address", "127.0.0.1:9811", "`host:port` of /metrics, /healthz and the issuer of service-account tokens, which is http://NODE-NAME:port if the host is omitted or means all addresses; empty for none")
	flags.StringVar(&o.NodeName, "node-name", "", "`name` of this machine; empty: its hostname")
	log := logFlags(cmd)
	cmd.RunE = func(*cobra.Command, []string) (err error) {
		if o.RootDir, err = filepath.Abs(*rootDir); err != nil {
			return err
		}
		if o.Registry == "" {
			o.Registry = filepath.Join(o.RootDir, "plugins_registry")
		}
		if o.NodeName == "" {
			if o.NodeName, err = os.Hostname(); err != nil {
				return err
			}
		}
		if err := log.Apply(); err != nil {
			return err
		}
		defer klog.Flush()
		ctx, stop := untilSignal()
		defer stop()
		return volumemanager.Run(ctx, o)
	}
	cmd.AddCommand(newVolumeStatusCommand(), newVolumeWaitCommand())
	return cmd
}

func rootDirFlag(cmd *cobra.Command) *string {
	dir := new(string)
	directoryFlag(cmd, dir, "root-dir", "/var/lib/trivet/volume-manager", "`directory` of pods and plugins, with the layout of a kubelet's; no kubelet may use it")
	return dir
}
