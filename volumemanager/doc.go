// Package volumemanager is the storage half of a kubelet on its own: it reads manifests,
// brings up the volumes of their pods at a kubelet's paths through volume plugins and CSI
// drivers, keeps them so, and takes them down again.
//
//	manifest → claim → state → reconciler → operation → plugin
//
// Nothing lives in memory alone: what is made and attached is written down before, and
// what is mounted is asked of disk and mount table. It is a CSI client, and knows nothing
// of how this project's own driver works.
package volumemanager
