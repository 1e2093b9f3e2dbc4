// Package volumemanager is a kubelet's volume manager without the rest of the kubelet. It reads
// manifests, mounts the volumes of their pods at the kubelet's paths, with volume plugins and CSI
// drivers, and unmounts them when the pods are removed. These packages handle the volumes, each with the
// result of the package before it:
//
//	manifest → claim → state → reconciler → operation → plugins
//
// The state is on disk: each provisioning and attachment is recorded before the call to the plugin.
// Mounts are found on disk and in the mount table. The package is a CSI client and does not depend on this
// project's driver.
package volumemanager
