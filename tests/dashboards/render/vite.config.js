import react from '@vitejs/plugin-react';
import { defineConfig } from 'vite';

const proxy = {
  '/prom': { target: process.env.PROMETHEUS_URL, rewrite: (path) => path.replace(/^\/prom/, '') },
};

export default defineConfig({
  plugins: [react()],
  resolve: {
    // @grafana/runtime asks for the compatibility package, whose router has no useHistory.
    alias: { 'react-router-dom-v5-compat': 'react-router-dom' },
    dedupe: ['react', 'react-dom', 'react-router-dom'],
  },
  define: { 'process.env.NODE_ENV': '"production"', 'process.env': '{}' },
  build: { minify: false, chunkSizeWarningLimit: 1e5 },
  preview: { host: '127.0.0.1', strictPort: true, proxy },
});
